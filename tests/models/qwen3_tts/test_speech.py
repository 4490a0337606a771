"""Codes and sound are those of the published code, alone and together, on one rank and on two."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from models.qwen3_omni.code2wav import Code2Wav
from models.qwen3_tts import nodes
from models.qwen3_tts.talker import Talker
from shared.events import OutputChunk, WalkCompleted
from tests.models.qwen3_tts import serving
from tests.models.qwen3_tts.cases import CASES, FRAMES, HEARD
from tests.models.qwen3_tts.serving import APART, SAMPLES, TOGETHER, Asked, recorded
from tests.tiny.qwen3_tts import CODES, tiny_qwen3_tts
from tests.workers.cluster import Cluster
from tests.workers.harness import SUBJECTS, fence

EIGHT = {"initial_codec_chunk_frames": 8}


@cache
def codec() -> Code2Wav:
    """Our decoder."""
    node = nodes.load(tiny_qwen3_tts(), "Codec")
    assert isinstance(node, Code2Wav)
    return node


def decoded(codes: np.ndarray[Any, Any], chunks: list[int]) -> np.ndarray[Any, Any]:
    """The sound of codes in chunks of so many frames, with the published context, by our decoder."""
    found, end = [], 0
    for count in chunks:
        begin, end = end, end + count
        given = torch.from_numpy(codes[max(0, begin - 25) : end]).long()
        with torch.inference_mode():
            found.append(codec()._model(given.T[None])[0, 0, -count * SAMPLES :].numpy())
    return np.concatenate(found)


def samples(sound: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (sound * 32767).astype(np.int16)


def check(cluster: Cluster, name: str, case: str) -> None:
    codes = recorded(f"{case}.codes")
    sound = serving.released(cluster, name)
    assert len(sound) == len(codes) * SAMPLES, case
    expected = samples(decoded(codes, serving.frames_of(cluster, name)))
    np.testing.assert_allclose(sound, expected, atol=1, err_msg=case)


def test_the_recording_depends_on_text_speaker_language_and_instructions_and_varies() -> None:
    codes = {name: recorded(f"{name}.codes") for name in CASES}
    assert len({one.tobytes() for one in codes.values()}) == len(CASES)
    assert all(len({*map(tuple, one.tolist())}) > len(one) / 2 for one in codes.values())
    assert {len(one) for one in codes.values()} >= {FRAMES}
    assert min(len(one) for one in codes.values()) < FRAMES  # one ends by itself
    sound = recorded("sound")
    assert np.abs(sound).max() > 0.1
    assert np.mean(np.abs(sound) >= 1) < 0.02


def test_the_decoder_is_the_published_one_and_a_shifted_code_is_heard() -> None:
    codes, sound = recorded(f"{HEARD}.codes"), recorded("sound")
    full, rest = divmod(len(codes), 8)
    chunks = [8] * full + ([rest] if rest else [])
    np.testing.assert_allclose(decoded(codes, chunks), sound, atol=2e-5)
    shifted = codes.copy()
    shifted[4, 2] = (shifted[4, 2] + 1) % CODES
    assert np.abs(decoded(shifted, chunks) - sound).max() > 1e-3


async def test_speech_is_the_published_one_alone_together_and_on_two_ranks() -> None:
    async with serving.serving((0, 1)) as cluster:
        orders = serving.order(cluster, "alone", Asked.case("plain"), TOGETHER)
        await cluster.until(WalkCompleted, "alone", orders)
        check(cluster, "alone", "plain")
        assert serving.frames_of(cluster, "alone")[:3] == [4, 8, 16]
        counts = {case: serving.order(cluster, case, Asked.case(case), APART) for case in CASES}
        for case, count in counts.items():
            await cluster.until(WalkCompleted, case, count)
            check(cluster, case, case)


async def test_a_rank_that_is_killed_in_the_middle_of_speech_changes_nothing() -> None:
    async with serving.serving((0, 1)) as cluster:
        for rank in (0, 1):
            name = f"killed{rank}"
            orders = serving.order(cluster, name, Asked.case("text"), APART)
            await cluster.until(OutputChunk, name, 1, modality="audio")
            await cluster.members[rank].die()
            await cluster.join(rank)
            cluster.put(SUBJECTS.output("g-1", name, "conductor"), fence(name, 2))
            serving.order(cluster, name, Asked.case("text"), APART, attempt=2)
            await cluster.until(WalkCompleted, name, orders, attempt=2)
            codes = recorded("text.codes")
            sound = serving.released(cluster, name)
            assert len(sound) == len(codes) * SAMPLES
            chunks = [4, 8, 16, 32]
            begins = np.cumsum([0, *chunks])
            used = [min(size, len(codes) - at) for size, at in zip(chunks, begins, strict=False)]
            expected = samples(decoded(codes, [one for one in used if one > 0]))
            np.testing.assert_allclose(sound, expected, atol=2)


async def test_without_padding_or_with_another_voice_something_else_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative controls: the comparison fails where a mechanism is wrong."""
    codes = recorded("plain.codes")
    async with serving.serving() as cluster:
        orders = serving.order(cluster, "other", Asked("hello there", "ryan"), TOGETHER)
        await cluster.until(WalkCompleted, "other", orders)
        monkeypatch.setattr(Talker, "next_rows", lambda _, rows, __: rows)
        orders = serving.order(cluster, "unpadded", Asked.case("plain"), TOGETHER)
        await cluster.until(WalkCompleted, "unpadded", orders)
        for name in ("other", "unpadded"):
            sound = serving.released(cluster, name)
            expected = samples(decoded(codes, [len(codes)]))
            least = min(len(sound), len(expected))
            assert np.abs(sound[:least].astype(int) - expected[:least]).max() > 100, name


async def test_speech_whose_end_is_ignored_goes_on_with_codes_that_have_a_sound() -> None:
    codes = recorded("speaker.codes")
    case = CASES["speaker"]
    going = Asked(case["text"], case["speaker"], params={"temperature": 0.0, "ignore_eos": True})
    async with serving.serving() as cluster:
        orders = serving.order(cluster, "goes-on", going, TOGETHER)
        await cluster.until(WalkCompleted, "goes-on", orders)
        sound = serving.released(cluster, "goes-on")
    assert len(codes) < FRAMES
    assert len(sound) == FRAMES * SAMPLES


async def test_the_first_chunk_is_as_asked_or_by_the_load_and_seeds_are_repeated() -> None:
    drawn = Asked("hello there", "vivian", params={"ignore_eos": True}, options=EIGHT)
    async with serving.serving() as cluster:
        for name in ("one", "two"):
            orders = serving.order(cluster, name, drawn, TOGETHER)
            await cluster.until(WalkCompleted, name, orders)
        orders = serving.order(cluster, "busy", Asked.case("plain"), TOGETHER, concurrent=100)
        await cluster.until(WalkCompleted, "busy", orders)
        assert serving.frames_of(cluster, "one")[:2] == [8, 16]
        assert serving.frames_of(cluster, "busy")[0] == 25
        one, two = (serving.released(cluster, name) for name in ("one", "two"))
        np.testing.assert_array_equal(one, two)
        assert not np.array_equal(one, serving.released(cluster, "busy"))
