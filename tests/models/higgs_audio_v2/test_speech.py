"""Codes and sound are those of transformers' `generate` and codec, alone and together, on two ranks too."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from models.dia import codec
from models.dia.codec import frames_around
from models.dia.delayed_frames import DelayedFrames
from models.higgs_audio_v2.language_model import HiggsAudioLM
from models.higgs_audio_v2.speaker import Speaker
from shared.events import OutputChunk, WalkCompleted
from tests.models.higgs_audio_v2 import serving
from tests.models.higgs_audio_v2.serving import APART, STEPS, Asked
from tests.tiny import higgs_audio
from tests.workers.cluster import Cluster
from tests.workers.harness import SUBJECTS, fence

LSB = 1
"""16-bit steps by which sound that is decoded in chunks may differ from the whole."""
DRAWN = {"temperature": 1.3, "top_k": 20, "top_p": 0.9}
ASKED: Mapping[str, tuple[Asked, dict[str, Any]]] = {
    "plain": (Asked("hello there"), {}),
    "scene": (Asked("hello there", options={"scene": "SPEAKER0: a deep voice"}), {}),
    "bare": (Asked("hello there", options={"scene": "", "instructions": "Speak."}), {}),
    "dialogue": (Asked("[SPEAKER0] hello there [SPEAKER1] hi, grüße"), {}),
    "drawn": (Asked("hello there", params=DRAWN, seed=7), {"do_sample": True, "seed": 7, **DRAWN}),
    "published": (
        Asked("hello there", params={}, seed=8),
        {"do_sample": True, "seed": 8, "temperature": 0.3, "top_k": 50, "top_p": 0.95},
    ),
    "repeats": (
        Asked("hello there", params={"temperature": 0.4, "top_k": 0, "top_p": 1.0}, seed=9),
        {"do_sample": True, "seed": 9, "temperature": 0.4, "top_k": 0},
    ),
}


@cache
def said(name: str, *, steps: int = STEPS) -> torch.Tensor:
    """The delayed codes of the oracle."""
    asked, how = ASKED[name]
    return higgs_audio.spoken(serving.prompt_of(asked), steps=steps, **{"seed": asked.seed, **how})


@cache
def samples(delayed: torch.Tensor) -> np.ndarray[Any, np.dtype[np.int16]]:
    found: np.ndarray[Any, np.dtype[np.int16]] = (
        (higgs_audio.sound(delayed).clamp(-1, 1) * 32767).to(torch.int16).numpy()
    )
    return found


def check(cluster: Cluster, name: str, delayed: torch.Tensor) -> None:
    sound, whole = serving.released(cluster, name), samples(delayed)
    assert len(sound) == len(whole) == len(higgs_audio.frames(delayed)) * higgs_audio.HOP
    np.testing.assert_allclose(sound.astype(int), whole.astype(int), atol=LSB)


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The fresh codes that the codec gets, chunk by chunk."""
    found: list[torch.Tensor] = []
    decoded = codec.ChunkDecoder._decoded

    def seen(self: codec.ChunkDecoder, item: Any) -> Any:
        before, fresh, _ = item.inputs["span"].tolist()
        found.append(item.inputs["codes"][before : before + fresh].clone())
        return decoded(self, item)

    monkeypatch.setattr(codec.ChunkDecoder, "_decoded", seen)
    return found


def test_what_is_said_depends_on_text_scene_and_draws_and_varies() -> None:
    spoken = [higgs_audio.frames(said(name)) for name in ASKED]
    assert len({one.numpy().tobytes() for one in spoken}) == len(spoken)
    assert all(len({*map(tuple, one.tolist())}) >= len(one) // 2 for one in spoken)
    heard = samples(said("plain")).astype(int)
    assert np.abs(np.diff(heard)).max() > 1000
    assert np.mean(np.abs(heard) >= 32700) < 0.1


async def test_codes_and_sound_are_those_of_transformers(codes: list[torch.Tensor]) -> None:
    async with serving.serving() as cluster:
        for name, (asked, _) in ASKED.items():
            codes.clear()
            await cluster.until(WalkCompleted, name, serving.order(cluster, name, asked))
            delayed = said(name)
            torch.testing.assert_close(torch.cat(codes).long(), higgs_audio.frames(delayed), rtol=0, atol=0)
            check(cluster, name, delayed)
            assert serving.frames_of(cluster, name) == [4, 8, 16, 28]


async def test_many_speak_together_on_two_ranks() -> None:
    async with serving.serving((0, 1)) as cluster:
        orders = {name: serving.order(cluster, name, asked, APART) for name, (asked, _) in ASKED.items()}
        for name, number in orders.items():
            await cluster.until(WalkCompleted, name, number)
            check(cluster, name, said(name))


async def test_a_rank_that_is_killed_in_the_middle_of_speech_changes_nothing() -> None:
    asked, _ = ASKED["drawn"]
    async with serving.serving((0, 1)) as cluster:
        for rank in (0, 1):
            name = f"killed{rank}"
            orders = serving.order(cluster, name, asked, APART, steps=200)
            await cluster.until(OutputChunk, name, 1, modality="audio")
            await cluster.members[rank].die()
            await cluster.join(rank)
            cluster.put(SUBJECTS.output("g-1", name, "conductor"), fence(name, 2))
            serving.order(cluster, name, asked, APART, attempt=2, steps=200)
            await cluster.until(WalkCompleted, name, orders, attempt=2)
            check(cluster, name, said("drawn", steps=200))


@pytest.mark.parametrize("book", [0, 2])
async def test_speech_ends_by_itself_where_that_of_transformers_does(book: int) -> None:
    """A code that transformers says at step 30 becomes the end's, in one codebook, for both."""
    row = book * higgs_audio.CODES
    delayed = said("plain")
    said_there = int(delayed[0, 30, book])
    weight = higgs_audio.oracle().audio_lm_head.weight
    kept = weight.detach()[row + higgs_audio.EOS].clone()
    last = weight.detach()[row + said_there].clone() * 1.01

    async with serving.serving() as cluster:
        head = HiggsAudioLM.head

        def ending(self: HiggsAudioLM, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            found = head(self, hidden, indices)
            found[:, row + higgs_audio.EOS] = hidden.index_select(0, indices) @ last
            return found

        with pytest.MonkeyPatch.context() as patched, torch.no_grad():
            patched.setattr(HiggsAudioLM, "head", ending)
            weight[row + higgs_audio.EOS] = last
            try:
                ended = said.__wrapped__("plain")  # not remembered: the oracle is changed
            finally:
                weight[row + higgs_audio.EOS] = kept
            assert ended.shape[1] < STEPS
            assert (ended[0, -1] == higgs_audio.EOS).all()
            await cluster.until(WalkCompleted, "ends", serving.order(cluster, "ends", ASKED["plain"][0]))
        check(cluster, "ends", ended)
        facts = [event.results for event in cluster.events(WalkCompleted, "ends")]
        assert "'ended': 1" in str(facts)


@pytest.mark.parametrize(
    ("options", "chunks"), [({}, [64, 64, 68]), ({"initial_codec_chunk_frames": 5}, None)]
)
async def test_the_first_chunk_is_as_asked_or_by_the_load(
    options: dict[str, Any], chunks: list[int] | None
) -> None:
    asked = Asked("hello there", options=options)
    async with serving.serving() as cluster:
        orders = serving.order(cluster, "one", asked, steps=200, concurrent=100)
        await cluster.until(WalkCompleted, "one", orders)
        assert serving.frames_of(cluster, "one") == (chunks or [5, 10, 20, 40, 64, 57])
        check(cluster, "one", said("plain", steps=200))


def test_the_frames_around_a_chunk_are_those_that_its_sound_depends_on() -> None:
    """Also with an odd ratio: sound with the frames around is the same, with half of them it is another."""
    model, reach, hop = higgs_audio.codec(), frames_around(higgs_audio.RATIOS), higgs_audio.HOP
    given = torch.randint(0, 64, (1, higgs_audio.CODEBOOKS, 4 * reach + 1))
    middle = 2 * reach

    @torch.inference_mode()
    def at(around: int) -> torch.Tensor:
        wave = model.decode(given[..., middle - around : middle + around + 1]).audio_values[0].flatten()
        found: torch.Tensor = wave[around * hop : (around + 1) * hop]
        return found

    torch.testing.assert_close(at(reach), at(middle), rtol=0, atol=1e-5)
    assert (at(reach // 2) - at(middle)).abs().max() > LSB / 32767


def _wrong_route(monkeypatch: pytest.MonkeyPatch) -> None:
    states = HiggsAudioLM._states

    def text(self: Any, embeds: torch.Tensor, routes: Any, **given: Any) -> torch.Tensor:
        return states(self, embeds, None, **given)

    monkeypatch.setattr(HiggsAudioLM, "_states", text)


def _wrong_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = DelayedFrames._outputs

    def later(self: Any, *args: Any, is_last: bool) -> Any:
        found = outputs(self, *args, is_last=is_last)
        found["codes"][:-1, 1] = found["codes"][1:, 1].clone()
        return found

    monkeypatch.setattr(DelayedFrames, "_outputs", later)


def _repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speaker, "_without_repeats", lambda self, codes, logits: codes)


@pytest.mark.parametrize(
    ("mistake", "name"), [(_wrong_route, "plain"), (_wrong_delay, "plain"), (_repeats, "repeats")]
)
async def test_a_mistake_is_heard(mistake: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls."""
    async with serving.serving() as cluster:
        mistake(monkeypatch)
        orders = serving.order(cluster, "wrong", ASKED[name][0])
        await cluster.until(WalkCompleted, "wrong", orders)
        with pytest.raises(AssertionError):
            check(cluster, "wrong", said(name))
