"""Cohere Transcribe against transformers' `generate`: all requests at once, and its chunks of long files."""

from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from transformers import CohereAsrFeatureExtractor, CohereAsrForConditionalGeneration

from models.checkpoints.files import CheckpointError
from models.cohere_asr.decoder import CohereDecoder
from models.cohere_asr.graph import CohereOptions, remarks
from models.cohere_asr.settings import CohereSettings
from shared.errors import ClientError
from tests.models.whisper import served
from tests.models.whisper.served import Answer, Samples, rounded
from tests.tiny.cohere_asr import POSITIONS, WINDOW_S, tiny_cohere_asr
from tests.tiny.whisper import RATE, sound

CASES: dict[str, dict[str, Any]] = {
    "short": {"sound": sound(0.6, 0), "language": "en"},
    "longer": {"sound": sound(2.3, 1), "language": "english"},
    "german": {"sound": sound(2.3, 1), "language": "de"},
    "without punctuation": {"sound": sound(2.3, 1), "language": "de", "punctuation": False},
    "few tokens": {"sound": sound(2.3, 1), "language": "de", "max_window_tokens": 7},
    "window": {"sound": sound(WINDOW_S, 4), "language": "ja"},
    "long": {"sound": sound(13.7, 5), "language": "EN"},
}


def transcribe(*requests: dict[str, Any]) -> list[Answer]:
    return served.transcribe(*requests, family="cohere_asr", checkpoint=tiny_cohere_asr())


@cache
def answers() -> dict[str, Answer]:
    return dict(zip(CASES, transcribe(*CASES.values()), strict=True))


@cache
def _model() -> tuple[Any, Any, CohereSettings]:
    folder = tiny_cohere_asr()
    return (
        CohereAsrForConditionalGeneration.from_pretrained(str(folder)).eval(),
        CohereAsrFeatureExtractor.from_pretrained(str(folder)),
        CohereSettings.read(folder),
    )


@torch.inference_mode()
def generated(samples: Samples, language: str, *, punctuation: bool = True, most: int = 512) -> list[int]:
    """The tokens of one chunk by transformers."""
    model, extractor, settings = _model()
    given = extractor(rounded(samples), sampling_rate=RATE, return_tensors="pt")
    before = settings.before(language, is_punctuated=punctuation)
    found = model.generate(
        input_features=given.input_features,
        attention_mask=given.attention_mask,
        decoder_input_ids=torch.tensor([before]),
        max_length=min(len(before) + most, POSITIONS),
        do_sample=False,
    )[0].tolist()
    ids: list[int] = [token for token in found[len(before) :] if token != settings.end]
    return ids


@pytest.mark.parametrize("name", [name for name in CASES if name != "long"])
def test_the_tokens_are_those_of_generate(name: str) -> None:
    case, [window] = CASES[name], answers()[name].windows
    code = {"english": "en"}.get(case["language"], case["language"])
    options = {"punctuation": case.get("punctuation", True), "most": case.get("max_window_tokens", 512)}
    assert answers()[name].tokens == generated(case["sound"], code, **options)
    assert (window.language, window.final) == (code, True)
    assert len({*answers()[name].tokens}) > 3


def test_sound_language_and_options_matter() -> None:
    assert len({tuple(answer.tokens) for answer in answers().values()}) == len(CASES)


def test_a_longer_file_is_cut_as_transformers_cuts_it() -> None:
    samples, answer = CASES["long"]["sound"], answers()["long"]
    chunks = _model()[1]._split_audio_chunks_energy(torch.as_tensor(rounded(samples)))
    assert len(answer.windows) == len(chunks) > 3
    for window, chunk in zip(answer.windows, chunks, strict=True):
        [segment] = window.segments
        assert segment.tokens == generated(chunk.numpy(), "en")
    assert answer.finish is not None
    assert answer.finish.usage.counts == {"windows": len(chunks), "audio_ms": 13_700}
    assert {window.language_name for window in answer.windows} == {"english"}


@pytest.mark.parametrize("options", [{}, {"language": "klingon"}, {"language": "fr"}])
def test_a_language_has_to_be_named(options: dict[str, Any]) -> None:
    with pytest.raises(ClientError, match="expected one of de, en, ja") as refused:
        transcribe({"sound": CASES["short"]["sound"], **options})
    assert refused.value.code == "unknown_language"


@pytest.mark.parametrize("options", [{"task": "translate"}, {"timestamps": ["word"]}])
def test_what_the_model_cannot_do_is_no_option(options: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(options, CohereOptions)


def test_the_languages_are_told() -> None:
    assert "de, en, ja" in remarks(tiny_cohere_asr(), {})[0]


def test_a_wrong_position_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    whole = CohereDecoder._states

    def shifted(self: Any, embeds: Any, positions: Any, encoded: Any, attention: Any) -> Any:
        return whole(self, embeds, (positions + 1).clamp(max=POSITIONS - 1), encoded, attention)

    monkeypatch.setattr(CohereDecoder, "_states", shifted)
    served._torch_nodes.cache_clear()
    with pytest.raises(CheckpointError, match="differ from its own"):
        transcribe(CASES["short"])
    served._torch_nodes.cache_clear()


def test_frames_without_their_projection_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the bias of the projection is lost."""

    def without(self: Any, states: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = states @ self._body.proj.weight.T
        return found

    monkeypatch.setattr(CohereDecoder, "frames_of", without)
    [answer] = transcribe(CASES["longer"])
    assert answer.tokens != generated(CASES["longer"]["sound"], "en")
