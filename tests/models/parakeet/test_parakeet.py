"""Parakeet against transformers' `ParakeetForCTC.generate`, and its windows against the encoder over each."""

from functools import cache
from itertools import groupby
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import ParakeetFeatureExtractor, ParakeetForCTC

import models.parakeet.processing as processing_module
from models.base import Item
from models.media.in_process import InProcessReader
from models.media.kinds import MediaError
from models.parakeet import graph
from models.parakeet.ctc import spoken
from models.parakeet.graph import GRAPH
from models.parakeet.nodes import load
from models.parakeet.processing import load as load_processing
from models.speech_to_text.transcript import TRANSCRIPT, Transcript
from shared.errors import ClientError
from shared.events import Inputs, Limits, Media, Params, WalkResult
from shared.plans import Finish, PlanRequest, StepResult
from shared.tensors import Handle
from tests.models.whisper.served import Samples, rounded, wav
from tests.tiny.parakeet import tiny_parakeet
from tests.tiny.whisper import RATE, sound

DIGEST = f"{1:064x}"
FRAME = 1280
WINDOW_S, CONTEXT_S = 8, 2
"""In place of 120 and 10, for the test of a longer file."""


@cache
def parts() -> tuple[Any, Any, Any, Any]:
    folder = tiny_parakeet()
    model = ParakeetForCTC.from_pretrained(str(folder)).eval()
    return model, ParakeetFeatureExtractor.from_pretrained(str(folder)), load(folder, "encoder"), model.config


@torch.inference_mode()
def generated(samples: Samples) -> list[int]:
    """The token of each frame by transformers."""
    model, extractor, _, _ = parts()
    given = extractor(rounded(samples), sampling_rate=RATE, return_tensors="pt")
    found = model.generate(**given)[0]
    count = int(model._get_subsampling_output_length(given.attention_mask.sum(-1))[0])
    ids: list[int] = found[:count].tolist()
    return ids


@torch.inference_mode()
def transcribe(samples: Samples, **options: Any) -> tuple[list[Transcript], Finish]:
    """The windows of a file, by the family's plan and nodes."""
    processing = load_processing(
        tiny_parakeet(), max_seq_len=5000, media=InProcessReader({DIGEST: wav(samples)})
    )
    request = PlanRequest(
        request_id="r",
        inputs=Inputs(text="", files=[Media(modality="audio", digest=DIGEST)]),
        params=Params(options=options),
        limits=Limits(max_seq_len=5000, kv_tokens=5000, default_max_tokens=64),
        seed=0,
    )
    plan, windows = GRAPH.plan(request), []
    walk = next(plan)
    while True:
        args = walk.call().args  # type: ignore[union-attr]
        if walk.name == "listen":  # type: ignore[union-attr]
            facts = processing.run("listen", "k", {}, args).facts
        else:
            features = torch.as_tensor(processing.run("window", "k", {}, args).outputs["features"])
            [encoded] = parts()[2].run([Item(inputs={"features": features}, args=args)])
            inputs = {name: _handle(value) for name, value in encoded.outputs.items()}
            written = processing.run("transcript", "k", inputs, args).handle(TRANSCRIPT)
            windows.append(msgspec.json.decode(bytes(written.data or b""), type=Transcript))
            facts = processing.run("reader", "k", {TRANSCRIPT: written}, args).facts
        try:
            walk = plan.send(StepResult(walks=(WalkResult(name="", facts=dict(facts)),)))
        except StopIteration as stop:
            return windows, stop.value


def _handle(value: torch.Tensor) -> Handle:
    array = value.numpy()
    return Handle(key="k", dtype=str(array.dtype), shape=array.shape, data=array.tobytes())


def tokens(windows: list[Transcript]) -> list[int]:
    return [token for window in windows for one in window.segments for token in one.tokens]


def collapsed(ids: list[int]) -> list[int]:
    blank = parts()[3].pad_token_id
    return [token for token, _ in groupby(ids) if token != blank]


@pytest.mark.parametrize(("seconds", "seed"), [(0.7, 0), (3.3, 1), (5.0, 2)])
def test_a_short_file_is_one_pass_as_generate_has_it(seconds: float, seed: int) -> None:
    ids = generated(sound(seconds, seed))
    [window], finish = transcribe(sound(seconds, seed), timestamps=["word"])
    assert tokens([window]) == collapsed(ids)
    assert len(set(ids)) > 3
    assert (window.final, window.duration) == (True, seconds)
    assert finish.usage.completion_tokens == len(collapsed(ids))
    words = [word for one in window.segments for word in one.words or ()]
    assert "".join(word.word for word in words).replace(" ", "") == window.text.replace(" ", "")
    firsts = [place for place, token in enumerate(ids) if token != parts()[3].pad_token_id]
    assert words[0].start == pytest.approx(firsts[0] * 0.08, abs=0.01)
    assert all(one.start < one.end <= seconds + 0.1 for one in words)


def test_the_sound_matters() -> None:
    assert generated(sound(3.3, 1)) != generated(sound(3.3, 3))


def test_a_longer_file_is_heard_in_windows_with_context_on_both_sides(monkeypatch: Any) -> None:
    for module in (graph, processing_module):
        monkeypatch.setattr(module, "WINDOW_S", WINDOW_S)
        monkeypatch.setattr(module, "CONTEXT_S", CONTEXT_S)
    samples = sound(WINDOW_S + 7.0, 5)
    windows, finish = transcribe(samples)
    first = generated(samples[: (WINDOW_S + CONTEXT_S) * RATE])[: WINDOW_S * RATE // FRAME]
    behind = generated(samples[(WINDOW_S - CONTEXT_S) * RATE :])
    before = CONTEXT_S * RATE // FRAME
    rest = behind[before:]
    if behind[before] == behind[before - 1]:
        rest = rest[next(n for n, token in enumerate(rest) if token != rest[0]) :]
    assert tokens(windows) == [*collapsed(first), *collapsed(rest)]
    assert [window.seek for window in windows] == [0, WINDOW_S * 100]
    assert [window.final for window in windows] == [False, True]
    assert finish.usage.counts == {"windows": 2, "audio_ms": (WINDOW_S + 7) * 1000}
    ids = [one.id for window in windows for one in window.segments]
    assert ids == [*range(len(ids))]
    assert max(one.end for one in windows[1].segments) > WINDOW_S


def test_a_token_counts_where_it_begins() -> None:
    found = spoken([7, 7, 0, 7, 8, 8], [0.0] * 6, blank=0, first=1, stop=5)
    assert [(one.token, one.first, one.stop) for one in found] == [(7, 3, 4), (8, 4, 6)]


@pytest.mark.parametrize("samples", [np.zeros(0, np.float32), sound(0.01)])
def test_a_file_that_is_too_short_is_refused(samples: Samples) -> None:
    with pytest.raises(MediaError):
        transcribe(samples)


def test_it_does_not_translate() -> None:
    with pytest.raises(ClientError, match="task"):
        transcribe(sound(0.5), task="translate")
