"""Qwen3-ASR against transformers' processor and `generate`: requests at once, windows of long files."""

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
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    Qwen3ASRFeatureExtractor,
    Qwen3ASRForConditionalGeneration,
    Qwen3ASRProcessor,
)
from transformers.models.qwen3_asr.processing_qwen3_asr import LANGUAGE_CODE_TO_NAME

from models.checkpoints.files import CheckpointError
from models.programs import Pass
from models.qwen3_asr import processing
from models.qwen3_asr.graph import Qwen3AsrOptions, remarks
from models.qwen3_asr.nodes import Qwen3AsrEncoder, load
from models.qwen3_asr.settings import LANGUAGES, Qwen3AsrSettings
from models.speech_to_text.hearing_lm import HearingDecoder
from models.speech_to_text.window_program import Writer
from shared.errors import ClientError
from tests.models.whisper import served
from tests.models.whisper.served import Answer, Samples, rounded
from tests.tiny.qwen3_asr import MARK, tiny_qwen3_asr
from tests.tiny.whisper import RATE, sound

MOST = 12
CASES: dict[str, dict[str, Any]] = {
    "shorter than half a second": {"sound": sound(0.3, 0)},
    "short": {"sound": sound(0.77, 0)},
    "detected": {"sound": sound(5.3, 1)},
    "german": {"sound": sound(5.3, 1), "language": "de"},
    "by name": {"sound": sound(5.3, 1), "language": "Cantonese"},
    "with names": {"sound": sound(5.3, 1), "language": "de", "prompt": "wizards, jugs"},
    "many tokens": {"sound": sound(2.0, 3), "max_window_tokens": 40},
    "several passes": {"sound": sound(50.0, 4)},
    "long": {"sound": sound(13.7, 5), "window_seconds": 4, "language": "en"},
}


def transcribe(*requests: dict[str, Any]) -> list[Answer]:
    given = [{"max_window_tokens": MOST, **request} for request in requests]
    return served.transcribe(*given, family="qwen3_asr", checkpoint=tiny_qwen3_asr())


@cache
def answers() -> dict[str, Answer]:
    return dict(zip(CASES, transcribe(*CASES.values()), strict=True))


@cache
def _model() -> tuple[Any, Any]:
    folder = str(tiny_qwen3_asr())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = Qwen3ASRProcessor(
        Qwen3ASRFeatureExtractor.from_pretrained(folder), tokenizer, chat_template=tokenizer.chat_template
    )
    return Qwen3ASRForConditionalGeneration.from_pretrained(folder).eval(), processor


@torch.inference_mode()
def generated(
    samples: Samples, *, language: str | None = None, prompt: str | None = None, most: int = MOST
) -> list[int]:
    """The tokens of one window by transformers, with its own prompt, without the end."""
    model, processor = _model()
    given = processor.apply_transcription_request(rounded(samples), language=language, prompt=prompt)
    found = model.generate(**given, max_new_tokens=most, do_sample=False)[0, given.input_ids.shape[1] :]
    ends = Qwen3AsrSettings.read(tiny_qwen3_asr()).ends
    return [token for token in found.tolist() if token not in ends]


def _expected(name: str) -> list[int]:
    case = CASES[name]
    return generated(
        case["sound"],
        language=case.get("language"),
        prompt=case.get("prompt"),
        most=case.get("max_window_tokens", MOST),
    )


@pytest.mark.parametrize("name", [name for name in CASES if name != "long"])
def test_the_tokens_are_those_of_generate(name: str) -> None:
    [window] = answers()[name].windows
    assert answers()[name].tokens == _expected(name)
    assert window.final
    assert len({*answers()[name].tokens}) > 2


def test_sound_language_and_prompt_matter() -> None:
    assert len({tuple(answer.tokens) for answer in answers().values()}) == len(CASES)


def test_windows_of_a_longer_file_are_transcribed_by_themselves() -> None:
    answer, samples = answers()["long"], CASES["long"]["sound"]
    assert len(answer.windows) > 3
    for window in answer.windows:
        [segment] = window.segments
        part = samples[round(segment.start * RATE) : round(segment.end * RATE)]
        assert segment.tokens == generated(part, language="en")
    assert answer.times[0][0] == 0
    assert answer.times[-1][1] == 13.7
    assert all(one[1] == next_one[0] for one, next_one in zip(answer.times, answer.times[1:], strict=False))
    assert {(window.language, window.language_name) for window in answer.windows} == {("en", "english")}
    assert answer.finish is not None
    assert answer.finish.usage.counts["audio_ms"] == 13_700


@pytest.mark.parametrize(
    ("said", "text", "language"),
    [
        (f"language German{MARK}guten Tag", "guten Tag", ("de", "german")),
        (f"language None{MARK}", "", ("", "")),
        ("guten Tag", "guten Tag", ("", "")),
        (f"language German{MARK}" + "la" * 30, "la", ("de", "german")),
    ],
)
def test_the_language_is_told_in_front_of_the_text(said: str, text: str, language: tuple[str, str]) -> None:
    found = _processing()
    tokens = found._tokenizer.encode(said).ids
    spoken = found.spoken(Qwen3AsrOptions(), tokens)
    assert (spoken.text, (spoken.language, spoken.language_name)) == (text, language)
    assert text == _model()[1].decode(tokens, return_format="transcription_only")


def test_silence_is_no_text_and_draws_follow_the_seed() -> None:
    quiet, speech = np.zeros(3 * RATE, np.float32), CASES["short"]["sound"]
    drawn = {"sound": speech, "temperature": 1.0}
    silent, mixed, one, other = transcribe(
        {"sound": quiet},
        {"sound": np.concatenate([quiet, quiet, sound(3.0, 2)]), "window_seconds": 4},
        {**drawn, "seed": 3},
        {**drawn, "seed": 4},
    )
    [again, heard] = transcribe({**drawn, "seed": 3}, {"sound": quiet, "silence_threshold": None})
    assert (silent.texts, silent.tokens) == ([""], [])
    assert [len(window.segments) for window in mixed.windows] == [0, 0, 1, 1]
    assert one.tokens == again.tokens != other.tokens
    assert heard.tokens == generated(quiet)


def test_tied_embeddings_are_the_head(tmp_path: Path) -> None:
    for file in tiny_qwen3_asr().iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    decoder = load(tmp_path, "decoder")
    assert isinstance(decoder, HearingDecoder)
    assert torch.equal(decoder.lm_head.weight, weights["model.language_model.embed_tokens.weight"])


def test_the_languages_are_those_of_transformers() -> None:
    assert dict(LANGUAGES) == LANGUAGE_CODE_TO_NAME
    assert "yue" in remarks(tiny_qwen3_asr(), {})[0]


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(ClientError, match="expected one of ar, cs") as refused:
        transcribe({"sound": CASES["short"]["sound"], "language": "klingon"})
    assert refused.value.code == "unknown_language"


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": "fox " * 2040},
        {"prompt": "fox " * 3000},
        {"window_seconds": 1000},
    ],
)
def test_what_has_no_room_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ClientError) as refused:
        transcribe({"sound": CASES["short"]["sound"], **options})
    assert refused.value.code == "context_length_exceeded"


def test_a_prompt_cannot_stand_for_sound() -> None:
    with pytest.raises(ClientError) as refused:
        transcribe({"sound": CASES["short"]["sound"], "prompt": "<|audio_pad|>"})
    assert refused.value.code == "media_mismatch"


@pytest.mark.parametrize("options", [{"task": "translate"}, {"timestamps": ["word"]}])
def test_what_the_model_cannot_do_is_no_option(options: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(options, Qwen3AsrOptions)


def test_the_layout_of_the_other_package_is_refused(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"thinker_config": {}}')
    with pytest.raises(CheckpointError, match="ends with -hf"):
        Qwen3AsrSettings.read(tmp_path)


def test_rows_at_a_shifted_place_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the rows stand one token too early."""
    decoder = served._torch_nodes("qwen3_asr", tiny_qwen3_asr())[1]
    whole = type(decoder).splice

    def shifted(self: Any, ids: Any, rows: Any, at: Any) -> Any:
        return whole(self, ids, rows, at - 1)

    monkeypatch.setattr(type(decoder), "splice", shifted)
    [answer] = transcribe(CASES["detected"])
    assert answer.tokens != _expected("detected")


def test_a_wrong_position_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: each token of the text gets the position of the prompt's first one."""
    whole = Writer.passes

    def shifted(self: Writer) -> list[Pass]:
        return [replace(one, positions=0) if one.tokens == 1 else one for one in whole(self)]

    monkeypatch.setattr(Writer, "passes", shifted)
    [answer] = transcribe(CASES["detected"])
    assert answer.tokens != _expected("detected")


@torch.inference_mode()
def test_rows_computed_span_by_span_are_those_of_the_whole_file() -> None:
    model, processor = _model()
    given = processor.apply_transcription_request(rounded(CASES["detected"]["sound"]))
    whole = model.model.get_audio_features(given.input_features, given.input_features_mask).pooler_output
    heard = given.input_features[0, :, : int(given.input_features_mask.sum())]
    encoder = load(tiny_qwen3_asr(), "encoder")
    assert isinstance(encoder, Qwen3AsrEncoder)
    torch.testing.assert_close(encoder.encode(heard), whole)
    shorter = torch.cat([encoder._encode(part) for part in torch.split(heard, 100, dim=1)])
    assert (shorter - whole).abs().max() > 0.05


def test_a_known_language_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the language is not in the prompt."""
    monkeypatch.setattr(processing, "_FORCED", "")
    [answer] = transcribe(CASES["german"])
    assert answer.tokens != _expected("german")


def _processing() -> processing.Qwen3AsrProcessing:
    return processing.load(tiny_qwen3_asr(), max_seq_len=2048, media=None)  # type: ignore[arg-type]
