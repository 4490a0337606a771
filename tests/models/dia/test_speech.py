"""Codes and sound are those of transformers' `generate` and DAC, alone and together, on one rank and two."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from models.dia import codec
from models.dia.codec import frames_around
from models.dia.decoder import DiaDecoder
from models.dia.delayed_frames import DelayedFrames
from models.dia.speaker import Speaker
from shared.events import OutputChunk, WalkCompleted
from tests.models.dia import serving
from tests.models.dia.serving import APART, STEPS, Asked
from tests.tiny import dia
from tests.workers.cluster import Cluster
from tests.workers.harness import SUBJECTS, fence

LSB = 1
"""16-bit steps by which sound that is decoded in chunks may differ from the whole."""
UNGUIDED = {"guidance_scale": 1}
FEW = {"temperature": 0.0, "top_k": 3}
DRAWN = {"temperature": 1.3, "top_k": 20, "top_p": 0.9}
ASKED: Mapping[str, tuple[Asked, dict[str, Any]]] = {
    "plain": (Asked("[S1] hello there", options=UNGUIDED), {}),
    "guided": (Asked("[S1] hello there"), {"guidance_scale": 3.0}),
    "dialogue": (Asked("[S1] hello there [S2] hi, grüße"), {"guidance_scale": 3.0}),
    "stronger": (Asked("[S1] hello there", options={"guidance_scale": 5}), {"guidance_scale": 5.0}),
    "few": (Asked("[S2] what?", params=FEW), {"guidance_scale": 3.0, "top_k": 3}),
    "drawn": (
        Asked("[S1] hello there", params=DRAWN, seed=7),
        {"guidance_scale": 3.0, "do_sample": True, "seed": 7, **DRAWN},
    ),
    "published": (
        Asked("[S1] hello there", params={}, seed=8),
        {"do_sample": True, "seed": 8, **{k: v for k, v in dia.GENERATION.items() if k != "do_sample"}},
    ),
}


@cache
def said(name: str, *, steps: int = STEPS) -> torch.Tensor:
    """The delayed codes of the oracle."""
    asked, how = ASKED[name]
    return dia.spoken(asked.text, steps=steps, **{"guidance_scale": None, "top_k": None, **how})


@cache
def samples(delayed: torch.Tensor) -> np.ndarray[Any, np.dtype[np.int16]]:
    found: np.ndarray[Any, np.dtype[np.int16]] = (
        (dia.sound(delayed).clamp(-1, 1) * 32767).to(torch.int16).numpy()
    )
    return found


def check(cluster: Cluster, name: str, delayed: torch.Tensor) -> None:
    sound, whole = serving.released(cluster, name), samples(delayed)
    assert len(sound) == len(whole) == len(dia.frames(delayed)) * dia.HOP
    np.testing.assert_allclose(sound.astype(int), whole.astype(int), atol=LSB)


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The fresh codes that the codec gets, chunk by chunk."""
    found: list[torch.Tensor] = []
    decoded = codec.Dac._decoded

    def seen(self: codec.Dac, item: Any) -> Any:
        before, fresh, _ = item.inputs["span"].tolist()
        found.append(item.inputs["codes"][before : before + fresh].clone())
        return decoded(self, item)

    monkeypatch.setattr(codec.Dac, "_decoded", seen)
    return found


def test_what_is_said_depends_on_text_guidance_and_draws_and_varies() -> None:
    spoken = [dia.frames(said(name)) for name in ASKED]
    assert len({one.numpy().tobytes() for one in spoken}) == len(spoken)
    assert all(len({*map(tuple, one.tolist())}) >= len(one) // 2 for one in spoken)
    heard = samples(said("guided"))
    assert np.abs(heard).max() > 1000
    assert np.mean(np.abs(heard.astype(int)) >= 32700) < 0.1


async def test_codes_and_sound_are_those_of_transformers(codes: list[torch.Tensor]) -> None:
    async with serving.serving() as cluster:
        for name, (asked, _) in ASKED.items():
            codes.clear()
            await cluster.until(WalkCompleted, name, serving.order(cluster, name, asked))
            delayed = said(name)
            torch.testing.assert_close(torch.cat(codes).long(), dia.frames(delayed), rtol=0, atol=0)
            check(cluster, name, delayed)
            assert serving.frames_of(cluster, name) == [16, 38]


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


async def test_speech_ends_by_itself_where_that_of_transformers_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first code that transformers says at step 30 becomes the end's, for both."""
    delayed = said("guided")
    weight = dia.oracle().logits_dense.weight
    row = int(delayed[0, 30, 0])
    first = delayed[0, :, 0].tolist().index(row)
    kept = weight.detach()[dia.EOS].clone()
    head = DiaDecoder.head
    last = weight.detach()[row].clone() * 1.01

    def ending(self: DiaDecoder, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        found = head(self, hidden, indices)
        found[:, dia.EOS] = hidden.index_select(0, indices) @ last
        return found

    async with serving.serving() as cluster:
        monkeypatch.setattr(DiaDecoder, "head", ending)
        with torch.no_grad():
            weight[dia.EOS] = last
        try:
            ended = said.__wrapped__("guided")  # not remembered: the oracle is changed
        finally:
            with torch.no_grad():
                weight[dia.EOS] = kept
        assert ended.shape[1] <= first + dia.DELAYS[-1] + 1 < STEPS
        await cluster.until(WalkCompleted, "ends", serving.order(cluster, "ends", ASKED["guided"][0]))
        check(cluster, "ends", ended)
        facts = [event.results for event in cluster.events(WalkCompleted, "ends")]
        assert "'ended': 1" in str(facts)


@pytest.mark.parametrize(("options", "chunks"), [({}, [128, 66]), ({"initial_codec_chunk_frames": 5}, None)])
async def test_the_first_chunk_is_as_asked_or_by_the_load(
    options: dict[str, Any], chunks: list[int] | None
) -> None:
    asked = Asked("[S1] hello there", options=options)
    async with serving.serving() as cluster:
        orders = serving.order(cluster, "one", asked, steps=200, concurrent=100)
        await cluster.until(WalkCompleted, "one", orders)
        assert serving.frames_of(cluster, "one") == (chunks or [5, 10, 20, 40, 80, 39])
        check(cluster, "one", said("guided", steps=200))


def test_the_frames_around_a_chunk_are_those_that_its_sound_depends_on() -> None:
    """Sound with one frame more on both sides is the same; with two fewer it is another."""
    assert frames_around([8, 8, 4, 2]) == 10
    model, reach = dia.codec(), frames_around([4, 4, 2, 2])
    given = torch.randint(0, 64, (1, dia.CHANNELS, 4 * reach + 1))
    middle = 2 * reach

    @torch.inference_mode()
    def at(around: int) -> torch.Tensor:
        wave = (
            model.decode(audio_codes=given[..., middle - around : middle + around + 1])
            .audio_values[0]
            .flatten()
        )
        found: torch.Tensor = wave[around * dia.HOP : (around + 1) * dia.HOP]
        return found

    torch.testing.assert_close(at(reach), at(middle), rtol=0, atol=1e-5)
    assert (at(reach // 2) - at(middle)).abs().max() > LSB / 32767


def _wrong_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    states = DiaDecoder._states

    def doubled(self: Any, embeds: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        return states(self, embeds, positions * 2, *rest)

    monkeypatch.setattr(DiaDecoder, "_states", doubled)


def _wrong_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = DelayedFrames._outputs

    def later(self: Any, *args: Any, is_last: bool) -> Any:
        found = outputs(self, *args, is_last=is_last)
        found["codes"][:-1, 1] = found["codes"][1:, 1].clone()
        return found

    monkeypatch.setattr(DelayedFrames, "_outputs", later)


def _wrong_context(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Speaker._step

    def swapped(self: Any, logits: torch.Tensor) -> None:
        step(self, torch.cat(logits.chunk(2)[::-1]))

    monkeypatch.setattr(Speaker, "_step", swapped)


def _wrong_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    def tiled(self: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.repeat(1, self.layout.kv_heads // rows.shape[1], 1)

    monkeypatch.setattr(DiaDecoder, "_in_all_heads", tiled)


def _no_frames_around(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = DelayedFrames._outputs

    def alone(self: Any, *args: Any, **how: Any) -> Any:
        self._around = 0
        return outputs(self, *args, **how)

    monkeypatch.setattr(DelayedFrames, "_outputs", alone)


@pytest.mark.parametrize(
    "mistake", [_wrong_positions, _wrong_delay, _wrong_context, _wrong_heads, _no_frames_around]
)
async def test_a_mistake_is_heard(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls."""
    async with serving.serving() as cluster:
        mistake(monkeypatch)
        orders = serving.order(cluster, "wrong", ASKED["guided"][0])
        await cluster.until(WalkCompleted, "wrong", orders)
        with pytest.raises(AssertionError):
            check(cluster, "wrong", said("guided"))
