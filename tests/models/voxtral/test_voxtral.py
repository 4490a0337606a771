"""Voxtral against transformers' features and `generate`: requests at once, chunks and windows of files."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from transformers import VoxtralForConditionalGeneration, VoxtralProcessor, WhisperFeatureExtractor

from models.checkpoints.files import CheckpointError
from models.programs import Pass
from models.speech_to_text.window_program import Writer
from models.text.tokenizer import load_tokenizer
from models.voxtral import processing
from models.voxtral.graph import VoxtralOptions
from models.voxtral.nodes import VoxtralEncoder
from models.voxtral.settings import Prompt
from shared.errors import ClientError
from tests.models.whisper import served
from tests.models.whisper.served import Answer, Samples, rounded
from tests.tiny.voxtral import CHUNK_ROWS, CHUNK_S, END, PLACE, tiny_voxtral
from tests.tiny.whisper import RATE, sound

MOST = 12
CASES: dict[str, dict[str, Any]] = {
    "short": {"sound": sound(0.77, 0)},
    "a chunk": {"sound": sound(CHUNK_S, 1)},
    "three chunks": {"sound": sound(5.3, 2)},
    "german": {"sound": sound(5.3, 2), "language": "de"},
    "by name": {"sound": sound(5.3, 2), "language": "English"},
    "many tokens": {"sound": sound(2.0, 3), "max_window_tokens": 40},
    "several passes": {"sound": sound(45.0, 4)},
    "long": {"sound": sound(13.7, 5), "window_seconds": 4, "language": "en"},
}


def transcribe(*requests: dict[str, Any]) -> list[Answer]:
    given = [{"max_window_tokens": MOST, **request} for request in requests]
    return served.transcribe(*given, family="voxtral", checkpoint=tiny_voxtral())


@cache
def answers() -> dict[str, Answer]:
    return dict(zip(CASES, transcribe(*CASES.values()), strict=True))


@cache
def _model() -> tuple[Any, Any]:
    folder = str(tiny_voxtral())
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    return VoxtralForConditionalGeneration.from_pretrained(folder).eval(), extractor


@torch.inference_mode()
def generated(samples: Samples, *, code: str | None = None, most: int = MOST) -> list[int]:
    """The tokens of one window by transformers, without the end.

    Its processor needs mistral-common, which writes the tokens of `encode_transcription`: begin of text,
    instruction, sound, the language as text, and the task.
    """
    model, extractor = _model()
    features = VoxtralProcessor._retrieve_input_features(
        SimpleNamespace(feature_extractor=extractor),
        [rounded(samples)],
        CHUNK_S * 100,
        sampling_rate=RATE,
        padding=True,
        truncation=False,
        pad_to_multiple_of=CHUNK_S * RATE,
        return_tensors="pt",
    )
    language = load_tokenizer(tiny_voxtral())[0].encode(f"lang:{code}").ids if code else []
    ids = torch.tensor([[1, 3, 25, *[PLACE] * (CHUNK_ROWS * len(features)), 4, *language, 34]])
    found = model.generate(input_ids=ids, input_features=features, max_new_tokens=most, do_sample=False)
    return [token for token in found[0, ids.shape[1] :].tolist() if token != END]


def _expected(name: str) -> list[int]:
    case = CASES[name]
    code = {"English": "en"}.get(case.get("language", ""), case.get("language"))
    return generated(case["sound"], code=code, most=case.get("max_window_tokens", MOST))


@pytest.mark.parametrize("name", [name for name in CASES if name != "long"])
def test_the_tokens_are_those_of_generate(name: str) -> None:
    [window] = answers()[name].windows
    assert answers()[name].tokens == _expected(name)
    assert window.final
    assert len({*answers()[name].tokens}) > 2


def test_sound_and_language_matter() -> None:
    assert len({tuple(answer.tokens) for answer in answers().values()}) == len(CASES)


def test_windows_of_a_longer_file_are_transcribed_by_themselves() -> None:
    answer, samples = answers()["long"], CASES["long"]["sound"]
    assert len(answer.windows) > 3
    for window in answer.windows:
        [segment] = window.segments
        part = samples[round(segment.start * RATE) : round(segment.end * RATE)]
        assert segment.tokens == generated(part, code="en")
    assert (answer.times[0][0], answer.times[-1][1]) == (0, 13.7)
    assert {(window.language, window.language_name) for window in answer.windows} == {("en", "english")}


def test_a_language_is_not_told_if_it_was_detected() -> None:
    assert answers()["short"].windows[0].language == ""


def test_the_prompt_is_that_of_mistral_common() -> None:
    found = _processing().prompt(VoxtralOptions(language="german"))
    lang = 40 + 256 + 2
    assert found == [1, 3, 25, PLACE, 4, lang, 40 + ord(":"), 40 + 256 + 5, 34]


@pytest.mark.parametrize("language", ["klingon", "yue", "haw"])
def test_an_unknown_language_is_refused(language: str) -> None:
    with pytest.raises(ClientError, match="expected one of af, am") as refused:
        transcribe({"sound": CASES["short"]["sound"], "language": language})
    assert refused.value.code == "unknown_language"


def test_what_has_no_room_is_refused() -> None:
    with pytest.raises(ClientError) as refused:
        transcribe({"sound": CASES["short"]["sound"], "window_seconds": 1000})
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("options", [{"task": "translate"}, {"timestamps": ["word"]}])
def test_what_the_model_cannot_do_is_no_option(options: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(options, VoxtralOptions)


def test_a_tokenizer_without_the_task_is_refused(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match=r"found no \[TRANSCRIBE\]"):
        Prompt.read(SimpleNamespace(token_to_id=lambda name: None if name == "[TRANSCRIBE]" else 1), tmp_path)


def test_rows_at_a_shifted_place_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the rows stand one token too early."""
    decoder = served._torch_nodes("voxtral", tiny_voxtral())[1]
    whole = type(decoder).splice

    def shifted(self: Any, ids: Any, rows: Any, at: Any) -> Any:
        return whole(self, ids, rows, at - 1)

    monkeypatch.setattr(type(decoder), "splice", shifted)
    [answer] = transcribe(CASES["three chunks"])
    assert answer.tokens != _expected("three chunks")


def test_a_wrong_position_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: each token of the text gets the position of the prompt's first one."""
    whole = Writer.passes

    def shifted(self: Writer) -> list[Pass]:
        return [replace(one, positions=0) if one.tokens == 1 else one for one in whole(self)]

    monkeypatch.setattr(Writer, "passes", shifted)
    [answer] = transcribe(CASES["three chunks"])
    assert answer.tokens != _expected("three chunks")


def test_chunks_in_another_order_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the last chunk comes first."""
    whole = VoxtralEncoder.encode

    def turned(self: Any, heard: torch.Tensor) -> torch.Tensor:
        return whole(self, torch.roll(heard, CHUNK_S * 100, dims=1))

    monkeypatch.setattr(VoxtralEncoder, "encode", turned)
    [answer] = transcribe(CASES["three chunks"])
    assert answer.tokens != _expected("three chunks")


def _processing() -> processing.VoxtralProcessing:
    return processing.load(tiny_voxtral(), max_seq_len=2048, media=None)  # type: ignore[arg-type]
