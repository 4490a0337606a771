"""A thinker, its talker and their sound are those of transformers' `generate`, on one rank and several."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from models.omni.positions import omni_positions
from models.qwen3_omni.thinker import Thinker
from models.sequence_request import PromptPart
from shared.events import OutputChunk, WalkCompleted
from tests.models.omni.media import film, picture, sound
from tests.models.omni.serving import NODES, Asked, released
from tests.models.qwen3_omni import serving
from tests.models.qwen3_omni.serving import SERVED
from tests.workers.cluster import Cluster
from tests.workers.harness import SUBJECTS, fence

TOGETHER = dict.fromkeys(NODES, 0)


def check(cluster: Cluster, name: str, asked: Asked) -> None:
    wanted = serving.reference(asked)
    assert released(cluster, name, "text").decode() == SERVED.text_of(wanted.token_ids), name
    sound = np.frombuffer(released(cluster, name, "audio"), "<i2")
    whole = serving.sound_of(wanted.codes)
    assert sound.shape == whole.shape
    np.testing.assert_allclose(sound, whole, atol=2)


ASKED = (
    Asked("hello there", voice="chelsie"),
    Asked("what is it?", (picture(1),)),
    Asked("what is it?", (picture(2),), voice="Aiden", penalty=1.3),
    Asked("what is it?", (sound(1),)),
    Asked("what is it?", (sound(2), picture(1), sound(3, 2.3))),
    Asked("what is it?", (film(1), picture(2))),
    Asked("what is it?", (picture(2), film(1, 24), sound(1, 5.3)), track=sound(4, 5.3)),
    Asked("what is it?", (film(3, 24), picture(1)), track=sound(5, 3.7)),
    Asked("what is it?", (film(2), picture(1), sound(1)), fps=4),
)


async def test_images_and_sound_are_understood_and_spoken_about() -> None:
    said = [serving.reference(one) for one in ASKED]
    assert len({tuple(one.token_ids) for one in said}) == len(said)
    assert len({one.codes.numpy().tobytes() for one in said}) == len(said)
    async with SERVED.serving() as cluster:
        for number, asked in enumerate(ASKED):
            orders = SERVED.order(cluster, f"r{number}", asked, TOGETHER)
            await cluster.until(WalkCompleted, f"r{number}", orders)
            check(cluster, f"r{number}", asked)


LAYOUTS = {
    "two": {**TOGETHER, "vision_encoder": 1, "audio_encoder": 1, "Thinker": 1},
    "three": {**TOGETHER, "Thinker": 1, "Talker": 2},
}
"""M*'s placements on two ranks and on three."""


async def test_answers_together_on_two_ranks_and_on_three_are_those_of_transformers() -> None:
    async with SERVED.serving((0, 1, 2)) as cluster:
        for kind, layout in LAYOUTS.items():
            orders = [
                SERVED.order(cluster, f"{kind}{number}", asked, layout) for number, asked in enumerate(ASKED)
            ]
            for number, asked in enumerate(ASKED):
                await cluster.until(WalkCompleted, f"{kind}{number}", orders[number])
                check(cluster, f"{kind}{number}", asked)


async def test_a_rank_that_is_killed_in_the_middle_of_speech_changes_nothing() -> None:
    asked, layout = ASKED[1], LAYOUTS["three"]
    async with SERVED.serving((0, 1, 2)) as cluster:
        orders = SERVED.order(cluster, "whole", asked, layout)
        await cluster.until(WalkCompleted, "whole", orders)
        check(cluster, "whole", asked)
        for rank in (0, 1, 2):
            name = f"killed{rank}"
            SERVED.order(cluster, name, asked, layout)
            await cluster.until(OutputChunk, name, 1, modality="audio")
            await cluster.members[rank].die()
            await cluster.join(rank)
            cluster.put(SUBJECTS.output("g-1", name, "conductor"), fence(name, 2))
            SERVED.order(cluster, name, asked, layout, attempt=2)
            await cluster.until(WalkCompleted, name, orders, attempt=2)
            for modality in ("text", "audio"):
                found = released(cluster, name, modality)
                assert found == released(cluster, "whole", modality)


async def test_speech_begins_long_before_the_text_ends_and_its_first_chunk_is_small() -> None:
    asked = ASKED[0]
    async with SERVED.serving() as cluster:
        orders = SERVED.order(cluster, "long", asked, TOGETHER, tokens=64, initial_codec_chunk_frames=2)
        await cluster.until(WalkCompleted, "long", orders)
        kinds = [(chunk.modality, len(chunk.data or b"")) for chunk in cluster.chunks("long")]
        first = next(place for place, (kind, _) in enumerate(kinds) if kind == "audio")
        assert sum(kind == "text" for kind, _ in kinds[first:]) > 1
        assert [size for kind, size in kinds if kind == "audio" and size] == _sizes(2, 4, 6)
        orders = SERVED.order(cluster, "busy", asked, TOGETHER, concurrent=100)
        await cluster.until(WalkCompleted, "busy", orders)
        busy = [chunk.data for chunk in cluster.chunks("busy") if chunk.modality == "audio"]
        assert [len(data) for data in busy if data] == _sizes(serving.FRAMES)


def _sizes(*frames: int) -> list[int]:
    """The bytes of chunks of so many frames: the first lacks the samples that the decoder looks ahead."""
    samples, delay = 24, 15
    return [2 * (samples * count - (0 if place else delay)) for place, count in enumerate(frames)]


# ---- negative controls -----------------------------------------------------------------------------


def _in_a_row(_self: object, prompt_ids: Sequence[int], _parts: object) -> tuple[torch.Tensor, int]:
    count = len(prompt_ids)
    return torch.arange(count, dtype=torch.int32).repeat(3, 1), count


def _in_whole_numbers(
    self: Thinker, prompt_ids: Sequence[int], parts: Sequence[PromptPart]
) -> tuple[torch.Tensor, float]:
    found, following = omni_positions(self.model, self.rules, prompt_ids, parts)
    return found.floor(), following // 1


def _without_deeper_features(
    self: Thinker, token_ids: torch.Tensor, rows: torch.Tensor, at: torch.Tensor
) -> Any:
    embeds, places, added = _SPLICE(self, token_ids, rows, at)
    return embeds, places, [torch.zeros_like(one) for one in added]


_SPLICE = Thinker.splice


@pytest.mark.parametrize(
    ("method", "wrong", "asked"),
    [
        ("positions", _in_a_row, ASKED[1]),
        ("positions", _in_whole_numbers, ASKED[-1]),
        ("splice", _without_deeper_features, ASKED[1]),
    ],
)
async def test_answers_differ_with_wrong_positions_and_without_deeper_features(
    method: str, wrong: Any, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Thinker, method, wrong)
    async with SERVED.serving() as cluster:
        orders = SERVED.order(cluster, "wrong", asked, TOGETHER)
        await cluster.until(WalkCompleted, "wrong", orders)
        said = released(cluster, "wrong", "text").decode()
        heard = np.frombuffer(released(cluster, "wrong", "audio"), "<i2")
    wanted = serving.reference(asked)
    assert said != SERVED.text_of(wanted.token_ids)
    whole = serving.sound_of(wanted.codes)
    assert heard.shape != whole.shape or np.abs(heard.astype(int) - whole).max() > 1000


def test_sound_differs_with_shifted_codes() -> None:
    codes = serving.reference(ASKED[0]).codes
    right, wrong = serving.sound_of(codes), serving.sound_of(codes.roll(1, 1))
    assert np.abs(right.astype(int) - wrong).max() > 1000
