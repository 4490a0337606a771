"""BAGEL on two and three ranks, as M* places it, with real engines: what it writes and draws on one rank."""

import asyncio
import hashlib
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from conductor.core.orders import merged
from configs.checks import check
from configs.deployment import DeploymentConfig
from configs.files import read
from configs.placement import assign
from models.bagel.graph import GRAPH
from models.bagel.walks import CFG_NODES
from models.media.in_process import InProcessReader
from shared.events import Inputs, Limits, Media, NodeReady, OutputChunk, Params, WalkCall, WalkCompleted
from shared.meters import EdgeMeters
from shared.plans import Chain, PlanRequest, StepResult, Walk
from tests.models.bagel.cases import picture
from tests.tiny.bagel import bagel_checkpoint
from tests.workers.cluster import Cluster, clustered, until
from tests.workers.harness import SUBJECTS, fence, turns
from workers import settings
from workers.data_plane.port import TensorStore
from workers.loading.model import LocalModel

SMALL: Final = {"width": 48, "height": 64, "num_timesteps": 6}
CASES: Final[Mapping[str, tuple[str, bool, dict[str, Any]]]] = {
    "writes": ("text", False, {}),
    "writes of an image": ("text", True, {}),
    "draws": ("image", False, SMALL),
    "draws after a thought": ("image", False, SMALL | {"think_mode": True}),
    "edits": ("image", True, SMALL | {"cfg_img_scale": 2.0}),
}
"""By name: the modality of the answer, whether the question has an image, and the options."""
PLACEMENTS: Final = {
    "bagel_single_gpu": (0, 0),
    "bagel_pd_disaggregated": (1, 1),
    "bagel_img_disaggregated": (1, 2),
}
"""By configuration, the rank that writes, and the rank that draws."""


Ordered: TypeAlias = Callable[..., list[NodeReady]]
"""Orders a step at all its ranks, or `only` at some."""
Order: TypeAlias = Callable[[Ordered, list[WalkCall]], Awaitable[list[NodeReady]]]


def question_image() -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture()).save(file, "PNG")
    return file.getvalue()


IMAGE: Final = question_image()
DIGEST: Final = hashlib.sha256(IMAGE).hexdigest()


def configuration(name: str, **kwargs: Any) -> DeploymentConfig:
    """M*'s placement of this name, with the tiny checkpoint."""
    base = read(name)
    kwargs = {"device": "cpu", **kwargs}
    raw = {**base.values, "checkpoint": str(bagel_checkpoint()), "model_kwargs": kwargs}
    return check(raw, source=base.source, folder=base.folder, name=base.name)


@asynccontextmanager
async def studio(name: str, **kwargs: Any) -> AsyncIterator[Cluster]:
    """The three ranks of a placement."""
    used = configuration(name, **kwargs)

    def model(rank: int, store: TensorStore) -> LocalModel:
        reader = InProcessReader({DIGEST: IMAGE})
        return LocalModel(used, settings.of(used), rank, store.allocate, media=reader)

    async with clustered(GRAPH, used, model, ranks=(0, 1, 2)) as cluster:
        yield cluster


def asked(request_id: str, modality: str, has_image: bool, options: Mapping[str, Any]) -> PlanRequest:
    part = [{"type": "image", "file": 0}] if has_image else []
    message = {"role": "user", "content": [*part, {"type": "text", "text": "a red circle"}]}
    is_spread = "parallel" in request_id
    return PlanRequest(
        request_id=request_id,
        inputs=Inputs(
            messages=[message],
            files=[Media(modality="image", digest=DIGEST, size=len(IMAGE))] if has_image else [],
            output_modalities=[modality],
        ),
        params=Params(max_tokens=6, options=dict(options), temperature=0.9, seed=5),
        limits=Limits(
            max_seq_len=32_768,
            kv_tokens=32_768,
            default_max_tokens=6,
            absent_nodes=() if is_spread else tuple(CFG_NODES),
        ),
        seed=5,
    )


async def answered(
    cluster: Cluster, request: PlanRequest, placement: str, order: Order | None = None
) -> list[OutputChunk]:
    """Run a request's plan as the conductor does; the chunks of the answer."""
    request_id, plan, result = request.request_id, GRAPH.plan(request), None
    groups = configuration(placement).groups
    nodes, by_walk = assign(groups, [group.ranks[0] for group in groups])
    for number in count():
        try:
            step = plan.send(result)
        except StopIteration:
            return [chunk for chunk in cluster.chunks(request_id) if not chunk.advisory]
        assert isinstance(step, Walk | Chain)
        calls = [walk.call() for walk in (step.walks if isinstance(step, Chain) else [step])]
        ordered = partial(
            cluster.order, request_id, *calls, step=number, ranks=nodes, by_walk=by_walk, seed=5
        )
        orders = await order(ordered, calls) if order else ordered()
        done = await cluster.done(request_id, len(orders), index=number)
        results = merged({rank: tuple(part.results) for rank, part in done.items()})
        assert not isinstance(results, str), results
        result = StepResult(results)
    raise AssertionError


def pixels(chunks: list[OutputChunk]) -> npt.NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(b"".join(chunk.data or b"" for chunk in chunks))))


def tokens(chunks: list[OutputChunk]) -> list[int]:
    return [one for chunk in chunks for one in chunk.token_ids]


async def test_two_and_three_ranks_write_and_draw_what_one_does() -> None:
    answers = dict[str, object]()
    async with studio("bagel_img_disaggregated") as cluster:
        for name, (modality, has_image, options) in CASES.items():
            writes, draws = modality == "text" or "thought" in name, modality == "image"
            for placement, (writer, painter) in PLACEMENTS.items():
                request_id = f"{placement}-{name.replace(' ', '-')}"
                request = asked(request_id, modality, has_image, options)
                chunks = await answered(cluster, request, placement)
                ranks = {one.rank for one in cluster.events(WalkCompleted, request_id)}
                assert ranks == {0, *([writer] if writes else []), *([painter] if draws else [])}
                found = pixels(chunks).tolist() if draws else tokens(chunks)
                assert found == answers.setdefault(name, found), (name, placement)
    assert len({str(one) for one in answers.values()}) == len(CASES), "the question and the options matter"


PARALLEL: Final = "bagel_cfg_parallel"
LARGE: Final = {"width": 128, "height": 64, "num_timesteps": 51}


def steps(cluster: Cluster, request_id: str, attempt: int) -> list[int]:
    """The steps that an attempt has reported."""
    chunks = (one for one in cluster.chunks(request_id) if one.attempt == attempt)
    return [one.metadata["progress"]["step"] for one in chunks if "progress" in one.metadata]


async def resumes_near_the_step_it_had_reached(cluster: Cluster) -> None:
    whole = await answered(cluster, asked("parallel", "image", False, LARGE), PARALLEL)
    task = asyncio.create_task(answered(cluster, asked("parallel-killed", "image", False, LARGE), PARALLEL))
    await until(lambda: max(steps(cluster, "parallel-killed", 1), default=0) >= 45)
    await cluster.members[1].die()
    task.cancel()
    assert steps(cluster, "parallel-killed", 1)[-1] < 50
    last = cluster.events(NodeReady, "parallel-killed")[-1]
    await cluster.join(1)
    cluster.put(SUBJECTS.output("g-1", "parallel-killed", "conductor"), fence("parallel-killed", 2))
    cluster.order("parallel-killed", *last.walks, step=last.index, attempt=2, seed=5)
    await cluster.done("parallel-killed", 3, attempt=2, index=last.index)
    again = [one for one in cluster.chunks("parallel-killed") if not one.advisory]
    assert steps(cluster, "parallel-killed", 2) == [45, 46, 47, 48, 49, 50]
    assert np.array_equal(pixels(again), pixels(whole))


async def takes_room_in_one_order(cluster: Cluster) -> None:
    """Each rank has room for one drawing. Ranks 1 and 2 know the second request before the first one."""
    ordered_first = asyncio.Event()

    async def late_on_the_others(ordered: Ordered, calls: list[WalkCall]) -> list[NodeReady]:
        if calls[0].name != "image_gen_cfg":
            return ordered()
        orders = ordered(only=[0])
        ordered_first.set()
        await until(lambda: held(cluster, 0) == (1, 1))
        for rank in (1, 2):
            await until(partial(has_heard_of_the_encoders, cluster, rank))
            await turns(200)
            assert held(cluster, rank) == (0, 0), "without room on rank 0, the second request takes none here"
        return [*orders, *ordered(only=[1, 2])]

    options = LARGE | {"num_timesteps": 5}
    one, other = (asked(f"parallel-{n}", "image", False, options) for n in range(2))
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(answered(cluster, one, PARALLEL, late_on_the_others))
        await ordered_first.wait()
        second = await answered(cluster, other, PARALLEL)
    assert np.array_equal(pixels(await first), pixels(second)), "they ask for the same"


def has_heard_of_the_encoders(cluster: Cluster, rank: int) -> bool:
    edges: EdgeMeters = cluster.members[rank].worker.vital_signs()["meters"].edges
    return edges.heard >= 2


def held(cluster: Cluster, rank: int) -> tuple[int, int]:
    """The runs of a rank that have their room, and those that wait for it."""
    counters = cluster.members[rank].model.counters()
    assert counters is not None
    return counters.running, counters.waiting


async def test_a_drawing_over_three_ranks_waits_for_no_other_one_and_resumes() -> None:
    async with studio(PARALLEL, max_sequences=1) as cluster:
        await takes_room_in_one_order(cluster)
        await resumes_near_the_step_it_had_reached(cluster)
