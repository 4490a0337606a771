"""A text and a scene become the prompt of the chat template; what cannot be spoken is refused before that."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from models.checkpoints.files import CheckpointError
from models.higgs_audio_v2 import processing
from models.higgs_audio_v2.language_model import HiggsAudioLM
from models.higgs_audio_v2.nodes import examine, load
from shared.errors import ClientError
from tests.models.higgs_audio_v2.serving import Asked, prompt_of, walks
from tests.tiny.higgs_audio import tiny_higgs_audio

SYSTEM = "Generate audio following instruction."
SCENE = "Audio is recorded from a quiet room."


@pytest.mark.parametrize(
    ("asked", "messages"),
    [
        (Asked("hello"), [("system", SYSTEM), ("scene", SCENE), ("user", "hello")]),
        (
            Asked(" [SPEAKER0] grüße ", voice="Auto", options={"scene": "SPEAKER0: deep"}),
            [("system", SYSTEM), ("scene", "SPEAKER0: deep"), ("user", " [SPEAKER0] grüße ")],
        ),
        (
            Asked("hello", options={"scene": " ", "instructions": "Whisper."}),
            [("system", "Whisper."), ("user", "hello")],
        ),
    ],
)
def test_the_prompt_is_that_of_transformers(asked: Asked, messages: list[tuple[str, str]]) -> None:
    said = [{"role": role, "content": content} for role, content in messages]
    tokenizer = AutoTokenizer.from_pretrained(tiny_higgs_audio())
    text = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    assert prompt_of(asked) == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Asked("hello", voice="alloy"), "voice: expected one of auto"),
        (Asked("a <|AUDIO_OUT|> b"), "spell a token of sound"),
        (Asked("hello", options={"scene": "<|audio_out_bos|>"}), "spell a token of sound"),
        (Asked("hello", params={"max_tokens": 4}), "max_tokens: expected 5 or more"),
        (Asked("hello", params={"max_tokens": 600}), "max_tokens: expected at most"),
        (Asked("hello", params={"repetition_penalty": 1.2}), "repetition_penalty: this model"),
        (Asked("hello", params={"stop": ["x"]}), "stop is a parameter of text"),
        (Asked("hello " * 600), "context length is 512"),
        (Asked("  "), "the text is empty"),
    ],
)
def test_what_cannot_be_spoken_is_refused(asked: Asked, message: str) -> None:
    with pytest.raises(ClientError, match=message):
        walks(asked)


def test_the_defaults_are_the_publishers_under_the_checkpoints(tmp_path: Path) -> None:
    args = walks(Asked("hello", params={}), steps=None).call().args
    assert [args[name] for name in ("temperature", "top_p", "top_k")] == [0.3, 0.95, 50]
    folder = _changed(tmp_path / "greedy", "generation_config.json", do_sample=False, top_k=7)
    params = processing.load(folder, max_seq_len=512)._defaults
    assert (params.temperature, params.top_p, params.top_k) == (0.0, 0.95, 7)


def test_an_answer_fits_the_room() -> None:
    prompt = len(prompt_of(Asked("hello")))
    longest = walks(Asked("hello"), steps=None, default_max_tokens=9999).call().args["max_tokens"]
    assert longest == 512 - prompt
    with pytest.raises(ClientError, match="raise max_seq_len or kv_tokens"):
        walks(Asked("hello"), kv_tokens=96)


def _changed(folder: Path, file: str, **values: Any) -> Path:
    shutil.copytree(tiny_higgs_audio(), folder)
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))
    return folder


@pytest.mark.parametrize(
    ("file", "values", "node", "message"),
    [
        ("config.json", {"num_codebooks": "four"}, "LLM", "num_codebooks"),
        ("config.json", {"audio_stream_eos_id": 66}, "LLM", "below the codebook_size of 66"),
        ("generation_config.json", {"ras_win_len": -1}, "LLM", "ras_win_len"),
        ("audio_tokenizer/config.json", {"sample_rate": 16000}, "codec_decoder", "of 24000 Hz"),
        ("audio_tokenizer/config.json", {"target_bandwidths": [2.4]}, "LLM", "a codec with 4 codebooks"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_refused(
    tmp_path: Path, file: str, values: dict[str, Any], node: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(_changed(tmp_path / "changed", file, **values), node)


def test_a_chat_template_without_the_begin_of_sound_is_refused(tmp_path: Path) -> None:
    folder = _changed(tmp_path / "other", "tokenizer_config.json", chat_template="{{ messages[-1].content }}")
    with pytest.raises(CheckpointError, match="end with the token audio_bos_token_id"):
        processing.load(folder, max_seq_len=512)


def test_a_missing_codec_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "alone"
    shutil.copytree(tiny_higgs_audio(), folder, ignore=lambda *_: ["audio_tokenizer"])
    monkeypatch.setattr("models.checkpoints.companions.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"higgs-audio-v2-tokenizer.*model_kwargs\.audio_tokenizer"):
        load(folder, "LLM")
    elsewhere = {"audio_tokenizer": str(tiny_higgs_audio() / "audio_tokenizer")}
    assert isinstance(load(folder, "LLM", kwargs=elsewhere), HiggsAudioLM)
    assert examine(folder, "LLM") == 512
