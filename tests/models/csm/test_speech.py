"""Codes and sound are those of transformers' `generate`, alone and together, on one rank and on two."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from models.csm.speech_lm import SpeechLM
from shared.events import OutputChunk, WalkCompleted
from tests.models.csm import serving
from tests.models.csm.serving import APART, FRAMES, SAMPLES, TOGETHER, Asked
from tests.tiny import csm
from tests.workers.cluster import Cluster
from tests.workers.harness import SUBJECTS, fence

ASKED = (
    Asked("hello there"),
    Asked("hello there", voice="1"),
    Asked("what do seven wizards mix?", voice="7"),
)


def said(asked: Asked) -> torch.Tensor:
    """The codes of the oracle."""
    return _said(tuple(asked.prompt()))


@cache
def _said(prompt: tuple[int, ...]) -> torch.Tensor:
    return csm.spoken(prompt, frames=FRAMES)


def check(cluster: Cluster, name: str, asked: Asked) -> None:
    codes = said(asked)
    sound = serving.released(cluster, name)
    np.testing.assert_array_equal(sound, serving.sound_of(codes, serving.frames_of(cluster, name)), name)
    assert len(sound) == FRAMES * SAMPLES
    whole = serving.sound_of(codes, [FRAMES])
    np.testing.assert_allclose(sound, whole, atol=4)


def test_what_is_said_depends_on_text_and_speaker_and_varies() -> None:
    spoken = [said(one) for one in ASKED]
    assert len({one.numpy().tobytes() for one in spoken}) == len(spoken)
    assert all(len({*map(tuple, one.tolist())}) >= FRAMES // 2 for one in spoken)
    heard = [serving.sound_of(one, [FRAMES]) for one in spoken]
    assert len({one.tobytes() for one in heard}) == len(heard)
    loud = heard[1]
    assert np.abs(loud).max() > 100
    assert np.mean(np.abs(loud) >= 32767) < 0.01


async def test_speech_is_that_of_transformers_alone_together_and_on_two_ranks() -> None:
    async with serving.serving((0, 1)) as cluster:
        orders = serving.order(cluster, "alone", ASKED[0], TOGETHER)
        await cluster.until(WalkCompleted, "alone", orders)
        check(cluster, "alone", ASKED[0])
        assert serving.frames_of(cluster, "alone") == [4, 8, 8]
        counts = [serving.order(cluster, f"two{number}", asked, APART) for number, asked in enumerate(ASKED)]
        for number, asked in enumerate(ASKED):
            await cluster.until(WalkCompleted, f"two{number}", counts[number])
            check(cluster, f"two{number}", asked)


async def test_a_rank_that_is_killed_in_the_middle_of_speech_changes_nothing() -> None:
    asked = ASKED[2]
    async with serving.serving((0, 1)) as cluster:
        for rank in (0, 1):
            name = f"killed{rank}"
            orders = serving.order(cluster, name, asked, APART)
            await cluster.until(OutputChunk, name, 1, modality="audio")
            await cluster.members[rank].die()
            await cluster.join(rank)
            cluster.put(SUBJECTS.output("g-1", name, "conductor"), fence(name, 2))
            serving.order(cluster, name, asked, APART, attempt=2)
            await cluster.until(WalkCompleted, name, orders, attempt=2)
            codes = said(asked)
            np.testing.assert_allclose(
                serving.released(cluster, name), serving.sound_of(codes, [4, 8, 8]), atol=1
            )


async def test_a_frame_of_the_end_ends_speech_but_its_first_code_alone_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = ASKED[1]
    codes = said(asked)
    firsts = codes[:, 0].tolist()
    assert csm.END in firsts
    before = max(firsts.index(code) for code in set(firsts))
    mark = firsts[before]
    frames = SpeechLM._frames

    def ending(self: SpeechLM, tokens: torch.Tensor, *args: Any) -> torch.Tensor:
        found = frames(self, tokens, *args)
        found[tokens == mark] = csm.END
        return found

    async with serving.serving() as cluster:
        monkeypatch.setattr(SpeechLM, "_frames", ending)
        orders = serving.order(cluster, "ends", asked, TOGETHER, frames=None)
        await cluster.until(WalkCompleted, "ends", orders)
    assert firsts.index(csm.END) < before
    assert len(serving.released(cluster, "ends")) == before * SAMPLES
    facts = [event.results for event in cluster.events(WalkCompleted, "ends")]
    assert "stop" in str(facts)


async def test_the_first_chunk_is_as_asked_or_by_the_load_and_seeds_are_repeated() -> None:
    options = {"initial_codec_chunk_frames": 2}
    drawn = Asked("hello there", params={}, options=options)
    async with serving.serving() as cluster:
        for name in ("one", "two"):
            orders = serving.order(cluster, name, drawn, TOGETHER)
            await cluster.until(WalkCompleted, name, orders)
        orders = serving.order(cluster, "busy", ASKED[0], TOGETHER, concurrent=100)
        await cluster.until(WalkCompleted, "busy", orders)
        assert serving.frames_of(cluster, "one")[:2] == [2, 4]
        assert serving.frames_of(cluster, "busy") == [FRAMES]
        one, two = (serving.released(cluster, name) for name in ("one", "two"))
        np.testing.assert_array_equal(one, two)
        assert not np.array_equal(one, serving.released(cluster, "busy"))
