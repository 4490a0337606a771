"""Released output stands (ADR 34): output that depends on the batch survives a worker's death.

The family of `tests.workers.painting` gives other bits in a batch of another size.
"""

from threading import Semaphore
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shared.events import OutputChunk, WalkCompleted, WalkFailed
from shared.walks.language import OnResume
from tests.workers.cluster import Cluster, until
from tests.workers.harness import SUBJECTS, fence
from tests.workers.mesh import Floats
from tests.workers.painting import after, images, model_of, output_of, paint, studio

REQUESTS = [f"r{number}" for number in range(8)]
START = np.array([1, 2, 3, 4], np.float32)
FIRST, SECOND, THIRD = after(START, 8), after(after(START, 8), 8), after(after(after(START, 8), 8), 8)


async def killed_between_two_images(cluster: Cluster) -> None:
    """Eight requests of two images each, computed together; their worker dies after the first."""
    model = model_of(cluster)
    model.painter.turns = turns = Semaphore(0)
    cluster.order("earlier", paint(1))  # the others wait for it
    await until(lambda: model.painter.batches == [1])  # in a batch of its own
    for name in REQUESTS:
        cluster.order(name, paint(2))
    await until(lambda: model.under_way == 1 + len(REQUESTS))
    turns.release(2)
    for name in REQUESTS:
        await cluster.until(OutputChunk, name)
    await cluster.members[0].die()
    await cluster.join(0)


async def again(cluster: Cluster, name: str, images: int = 2, attempt: int = 2) -> None:
    """Order a request once more, as a conductor does."""
    cluster.put(SUBJECTS.output("g-1", name, "conductor"), fence(name, attempt))
    cluster.order(name, paint(images), attempt=attempt)


async def outcome(cluster: Cluster, name: str) -> str:
    """`done`, or the code of the failure of the second attempt."""
    await cluster.until(WalkCompleted | WalkFailed, name, attempt=2, may_fail=True)  # type: ignore[arg-type]
    failed = [event for event in cluster.events(WalkFailed, name) if event.attempt == 2]
    return failed[0].failure.code if failed else "done"


@pytest.mark.parametrize(("on_resume", "expected"), [("reproduce", "divergence"), ("keep", "done")])
async def test_batched_output_survives_a_death_only_if_what_was_released_stands(
    on_resume: OnResume, expected: str
) -> None:
    async with studio(on_resume) as cluster:
        await killed_between_two_images(cluster)
        found = []
        for name in REQUESTS:  # one by one: in batches of another size than before
            await again(cluster, name)
            found.append(await outcome(cluster, name))
        assert found == [expected] * len(REQUESTS)


async def test_the_walk_continues_with_the_released_image_and_not_with_the_one_computed_again() -> None:
    async with studio("keep") as cluster:
        await killed_between_two_images(cluster)
        await again(cluster, "r0")
        [done] = await cluster.until(WalkCompleted, "r0", attempt=2)
        output, chunks = output_of(cluster, "r0")

        assert [chunk.attempt for chunk in chunks] == [1, 2]
        first, second = images(chunks)
        assert np.array_equal(second, after(first, 1))
        assert not np.array_equal(first, after(START, 1))  # it would have been another one
        assert done.output == output.transcript.totals


# ---- tensors in pieces --------------------------------------------------------------------------------


def pieces(cluster: Cluster, name: str, of: list[Floats], attempt: int) -> list[OutputChunk]:
    """The chunks in which an earlier attempt emitted images: four pieces each."""
    data = b"".join(image.tobytes() for image in of)
    return [
        OutputChunk(
            id=f"{name}.out.{attempt}.{index}",
            writer="w0",
            request_id=name,
            attempt=attempt,
            incarnation=cluster.members[0].life,
            index=index,
            modality="image",
            data=data[4 * index : 4 * index + 4],
            metadata={
                "dtype": "float32", "shape": [4], "tensor": "painter.image", "piece": index % 4, "pieces": 4,
            },
        )
        for index in range(len(data) // 4)
    ]  # fmt: skip


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.execution.output_values.PIECE_BYTES", 4)


@pytest.mark.usefixtures("small_pieces")
async def test_an_image_is_never_made_of_pieces_of_two_computations_wherever_its_worker_died() -> None:
    async with studio("keep") as cluster:
        for released in range(13):
            name = f"r{released}"
            cluster.admit(name)
            for chunk in pieces(cluster, name, [FIRST, SECOND, THIRD], 1)[:released]:
                cluster.put(SUBJECTS.output("g-1", name, "w0"), chunk)
            await again(cluster, name, images=3)
            [done] = await cluster.until(WalkCompleted, name, attempt=2)
            output, chunks = output_of(cluster, name)

            whole = released // 4
            expected = [FIRST, SECOND, THIRD][:whole]
            while len(expected) < 3:
                expected.append(after(expected[-1] if expected else START, 1))
            assert np.array_equal(images(chunks), expected)
            assert [chunk.index for chunk in chunks] == list(range(12 + released % 4))
            assert done.output == output.transcript.totals


@pytest.mark.usefixtures("small_pieces")
async def test_an_image_that_was_begun_twice_is_begun_a_third_time() -> None:
    async with studio("keep") as cluster:
        cluster.admit("r")
        begun = pieces(cluster, "r", [FIRST], 1)
        place = SUBJECTS.output("g-1", "r", "w0")
        for chunk in begun[:2]:
            cluster.put(place, chunk)
        cluster.put(SUBJECTS.output("g-1", "r", "conductor"), fence("r", 2))
        for index, chunk in enumerate(pieces(cluster, "r", [SECOND], 2)[:3], start=2):
            cluster.put(place, replace(chunk, index=index, id=f"r.out.2.{index}"))
        await again(cluster, "r", images=2, attempt=3)
        await cluster.until(WalkCompleted, "r", attempt=3)
        _, chunks = output_of(cluster, "r")

        assert len(chunks) == 2 + 3 + 8
        assert np.array_equal(images(chunks), [after(START), after(after(START))])


@pytest.mark.usefixtures("small_pieces")
async def test_pieces_that_must_be_reproduced_are_compared_and_completed() -> None:
    async with studio("reproduce") as cluster:
        cluster.admit("r")
        for chunk in pieces(cluster, "r", [after(START)], 1)[:2]:
            cluster.put(SUBJECTS.output("g-1", "r", "w0"), chunk)
        await again(cluster, "r", images=1)
        await cluster.until(WalkCompleted, "r", attempt=2)
        _, chunks = output_of(cluster, "r")
        assert [chunk.attempt for chunk in chunks] == [1, 1, 2, 2]
        assert np.array_equal(images(chunks), [after(START)])


async def test_a_loop_that_ends_earlier_than_before_leaves_the_released_images_as_they_are() -> None:
    async with studio("keep") as cluster:
        cluster.order("r", paint(3))
        await cluster.done("r")
        await again(cluster, "r", images=1)
        await cluster.until(WalkCompleted, "r", attempt=2)
        _, chunks = output_of(cluster, "r")
        assert len(images(chunks)) == 3


# ---- advice -------------------------------------------------------------------------------------------


async def test_progress_and_previews_reach_clients_and_are_no_part_of_the_output() -> None:
    async with studio("keep") as cluster:
        model_of(cluster).painter.advises = True
        cluster.order("r", paint(2))
        done = (await cluster.done("r"))[0]
        output, chunks = output_of(cluster, "r")
        advice = [chunk for chunk in cluster.chunks("r") if chunk.advisory]

        first, second = (chunk.metadata for chunk in advice if chunk.modality == "progress")
        assert first == {"node": "painter", "progress": {"step": 1, "steps": 2}}
        assert second["progress"] == {
            "step": 2,
            "steps": 2,
            "steps_per_s": second["progress"]["steps_per_s"],
            "remaining_s": 0.0,
        }
        assert second["progress"]["steps_per_s"] > 0
        sketches = [one for one in advice if one.modality == "sketch"]
        assert [one.metadata for one in sketches] == [{"dtype": "float32", "shape": [1]}] * 2
        assert np.frombuffer(sketches[0].data or b"", "<f4") == 1.5
        assert {chunk.index for chunk in advice} == {-1}
        assert len({chunk.id for chunk in advice}) == 4
        assert [chunk.index for chunk in chunks] == [0, 1]
        assert done.output == output.transcript.totals


async def test_a_later_attempt_advises_anew_and_compares_no_advice() -> None:
    async with studio("reproduce") as cluster:
        model_of(cluster).painter.advises = True
        cluster.order("r", paint(2))
        await cluster.done("r")
        model_of(cluster).painter.advises = False
        await again(cluster, "r")
        [done] = await cluster.until(WalkCompleted, "r", attempt=2)
        assert done.output == output_of(cluster, "r")[0].transcript.totals
        assert len(output_of(cluster, "r")[1]) == 2


@pytest.mark.parametrize("progress", [{"what": object()}, {"text": "x" * (1 << 21)}])
async def test_progress_that_cannot_be_stored_fails_nothing(progress: dict[str, Any]) -> None:
    async with studio("keep") as cluster:
        model_of(cluster).painter.advises = True
        model_of(cluster).painter.progress = progress
        cluster.order("r", paint(1))
        await cluster.done("r")
        assert len(output_of(cluster, "r")[1]) == 1
        assert [chunk.modality for chunk in cluster.chunks("r") if chunk.advisory] == ["sketch"]
