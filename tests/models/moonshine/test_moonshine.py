"""Moonshine against transformers' `generate`: all requests at once, each with its own number of frames."""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from models.base import Item
from models.checkpoints.files import CheckpointError
from models.media.in_process import InProcessReader
from models.media.kinds import MediaError
from models.moonshine import decoder
from models.moonshine.graph import MoonshineOptions
from models.moonshine.nodes import examine, load
from models.moonshine.processing import load as load_processing
from models.moonshine.settings import MoonshineSettings, most_tokens
from models.speech_to_text.frames_decoder import TwoAttentions
from models.speech_to_text.windows import HEARD
from shared.errors import ClientError
from shared.events import Inputs, Media
from tests.models.moonshine import oracle
from tests.models.whisper import served
from tests.models.whisper.served import Answer, Samples, wav
from tests.tiny.moonshine import POSITIONS, tiny_moonshine
from tests.tiny.whisper import RATE, sound

SHORT: dict[str, Samples] = {
    "one second": sound(1.0, 9),
    "short": sound(2.3, 1),
    "five seconds": sound(5.2, 3),
    "that ends": sound(6.0, 9),
    "whole": sound(POSITIONS / 6.5 - 0.01, 4),
}
LONG = sound(21.7, 11)


def transcribe(*requests: dict[str, Any], **settings: Any) -> list[Answer]:
    return served.transcribe(*requests, family="moonshine", checkpoint=tiny_moonshine(), **settings)


@cache
def answers() -> dict[str, Answer]:
    found = transcribe(*({"sound": one} for one in SHORT.values()), {"sound": LONG})
    return dict(zip([*SHORT, "long"], found, strict=True))


@pytest.mark.parametrize("name", SHORT)
def test_the_tokens_are_those_of_generate(name: str) -> None:
    answer = answers()[name]
    assert answer.tokens == oracle.generate(SHORT[name])
    [window] = answer.windows
    assert (window.final, window.duration) == (True, len(SHORT[name]) / RATE)
    assert answer.finish is not None
    assert answer.finish.usage.completion_tokens == len(answer.tokens)


def test_what_is_heard_decides_the_text() -> None:
    tokens = [tuple(answer.tokens) for answer in answers().values()]
    assert len({*tokens}) == len(tokens)
    assert len({*answers()["five seconds"].tokens}) > 8


def test_some_texts_end_before_their_limit() -> None:
    limits = {name: most_tokens(len(one), 6.5, POSITIONS) - 1 for name, one in SHORT.items()}
    ended = {name for name, limit in limits.items() if len(answers()[name].tokens) < limit}
    assert ended
    assert ended < {*SHORT}


def test_a_longer_file_is_windows_that_end_at_pauses() -> None:
    answer = answers()["long"]
    assert len(answer.windows) > 3
    cuts = [round(one.segments[0].start * RATE) for one in answer.windows]
    assert [window.next_seek for window in answer.windows[:-1]] == [one.seek for one in answer.windows[1:]]
    for window, first, stop in zip(answer.windows, cuts, [*cuts[1:], len(LONG)], strict=True):
        [segment] = window.segments
        assert segment.tokens == oracle.generate(LONG[first:stop])
        assert (segment.start, segment.end) == (round(first / RATE, 2), round(stop / RATE, 2))
    assert [window.final for window in answer.windows] == [*[False] * (len(cuts) - 1), True]
    assert "".join(answer.texts) == " ".join(text.strip() for text in answer.texts)


def test_windows_fit_the_context() -> None:
    [answer] = transcribe({"sound": LONG}, max_seq_len=220)
    assert len(answer.windows) > len(answers()["long"].windows)
    assert all(one.end - one.start < 4.6 for window in answer.windows for one in window.segments)


def test_a_second_may_have_more_tokens() -> None:
    [answer] = transcribe({"sound": SHORT["short"], "tokens_per_second": 9})
    assert answer.tokens == oracle.generate(SHORT["short"], tokens_per_second=9)
    assert len(answer.tokens) > len(answers()["short"].tokens)


def test_draws_follow_from_the_seed() -> None:
    asked = {"sound": SHORT["five seconds"], "temperature": 0.8}
    one, again, other = transcribe({**asked, "seed": 1}, {**asked, "seed": 1}, {**asked, "seed": 2})
    assert one.tokens == again.tokens
    assert one.tokens != other.tokens
    assert one.tokens != answers()["five seconds"].tokens


def test_silence_has_no_text_unless_it_is_asked_for() -> None:
    quiet = np.concatenate([np.zeros(5 * RATE, np.float32), sound(5.5, 2)])
    silent, whole, asked = transcribe(
        {"sound": np.zeros(2 * RATE, np.float32)},
        {"sound": quiet},
        {"sound": np.zeros(2 * RATE, np.float32), "silence_threshold": None},
    )
    assert (silent.texts, silent.tokens) == ([""], [])
    assert silent.windows[0].segments == []
    assert silent.windows[0].duration == 2
    assert [bool(window.segments) for window in whole.windows] == [False, True]
    assert [one.id for window in whole.windows for one in window.segments] == [0]
    assert asked.tokens


def test_a_wrong_position_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rotary positions that are too far apart."""
    whole = decoder.MoonshineDecoder._states

    def shifted(self: Any, embeds: Any, positions: Any, encoded: Any, attention: Any) -> Any:
        return whole(self, embeds, positions * 2, encoded, attention)

    monkeypatch.setattr(decoder.MoonshineDecoder, "_states", shifted)
    served._torch_nodes.cache_clear()
    with pytest.raises(CheckpointError, match="differ from its own"):
        transcribe({"sound": SHORT["five seconds"]})
    served._torch_nodes.cache_clear()


def test_a_missing_frame_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the encoder's last frames are lost."""
    own = TwoAttentions.own

    def without(self: Any, module: Any, query: Any, cells: Any, frame_cells: Any, *, scaling: float) -> Any:
        keys, values = (one.clone() for one in frame_cells)
        keys[-20:], values[-20:] = 0, 0
        return own(self, module, query, cells, (keys, values), scaling=scaling)

    monkeypatch.setattr(TwoAttentions, "own", without)
    [answer] = transcribe({"sound": SHORT["five seconds"]})
    assert answer.tokens != oracle.generate(SHORT["five seconds"])


def listen(samples: Samples, **options: Any) -> dict[str, Any]:
    digest = f"{1:064x}"
    inputs = Inputs(text="", files=[Media(modality="audio", digest=digest)])
    processing = load_processing(
        tiny_moonshine(), max_seq_len=2048, media=InProcessReader({digest: wav(samples)})
    )
    args = {"inputs": msgspec.to_builtins(inputs), "options": options}
    return dict(processing.run("listen", "k", {}, args).facts)


@pytest.mark.parametrize("samples", [np.zeros(0, np.float32), sound(0.05)])
def test_a_file_that_is_too_short_is_refused(samples: Samples) -> None:
    with pytest.raises(MediaError) as refused:
        listen(samples)
    assert not len(samples) or refused.value.digest


def test_windows_of_no_length_are_refused() -> None:
    with pytest.raises(ClientError, match="tokens_per_second"):
        listen(sound(1.0), tokens_per_second=40)


@pytest.mark.parametrize(
    "options", [{"task": "translate"}, {"timestamps": ["word"]}, {"silence_threshold": 2}]
)
def test_what_the_model_cannot_do_is_no_option(options: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(options, MoonshineOptions)


def test_published_limits() -> None:
    settings = replace(MoonshineSettings.read(tiny_moonshine()), positions=194)
    assert settings.longest_window(6.5, 2048) == int(194 / 6.5 * RATE)
    assert settings.longest_window(1.0, 8192) == 64 * RATE
    assert most_tokens(10 * RATE, 6.5, 194) == 65
    assert most_tokens(40 * RATE, 6.5, 194) == 194
    assert most_tokens(RATE // 2, 6.5, 194) == 6, "a sound shorter than a second may have a word"


@pytest.mark.parametrize("name", ["decoder_num_key_value_heads", "encoder_num_attention_heads"])
def test_a_checkpoint_that_transformers_does_not_run_is_refused(tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(tiny_moonshine(), tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {name: 2}))
    for refused in (lambda: load(folder, "decoder"), lambda: examine(folder, "decoder")):
        with pytest.raises(CheckpointError, match="number of heads"):
            refused()


def test_the_encoder_takes_sound_of_any_length() -> None:
    encoder = load(tiny_moonshine(), "encoder")
    for seconds in (0.1, 1.7):
        samples = torch.as_tensor(sound(seconds, 1))
        with torch.inference_mode():
            [found] = encoder.run([Item(inputs={HEARD: samples}, args={"count": len(samples)})])  # type: ignore[union-attr]
        frames = ((len(samples) - 127) // 64 + 1 - 7) // 3 + 1
        assert len(found.outputs["states"]) == (frames - 3) // 2 + 1  # type: ignore[union-attr]
