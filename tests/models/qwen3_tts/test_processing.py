"""What is asked of Qwen3-TTS is checked before anything is computed."""

from pathlib import Path
from typing import Any

import pytest

from models.checkpoints.files import UnsupportedArchitectureError
from models.qwen3_tts import nodes, processing
from models.registry import family_of
from shared.errors import ClientError
from shared.events import Inputs, Params
from tests.models.qwen3_tts.serving import prepares
from tests.tiny.qwen3_tts import tiny_qwen3_tts, write_qwen3_tts


def facts(text: str = "hello there", **params: Any) -> dict[str, Any]:
    args = {
        "inputs": Inputs(text=text, output_modalities=["audio"]),
        "params": Params(**params),
    }
    return dict(prepares().run("prepare", "k", {}, args).facts)


def test_the_family_follows_from_the_folder() -> None:
    assert family_of(tiny_qwen3_tts()) == "qwen3_tts"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"voice": "alloy"}, "voice: expected one of vivian, ryan, eric; found 'alloy'"),
        ({"options": {"speaker": "alloy"}}, "voice: expected one of vivian"),
        ({"options": {"language": "latin"}}, "language: expected one of auto, chinese, english"),
        ({"stop": ["."]}, "stop is a parameter of text output"),
        ({"text": " "}, "the text is empty"),
        ({"text": "hello " * 300}, "tokens"),
    ],
)
def test_wrong_requests_are_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ClientError, match=said):
        facts(**wrong)


def test_sampling_is_the_published_one_unless_asked_otherwise() -> None:
    found = facts()
    assert found["sampling"]["temperature"] == 0.9
    assert found["sampling"]["top_k"] == 50
    assert found["sampling"]["repetition_penalty"] == 1.05
    assert found["sampling"]["min_tokens"] == 2
    assert facts(max_tokens=1)["sampling"]["min_tokens"] == 1
    assert found["inner_sampling"] == {"temperature": 0.9, "top_k": 50, "top_p": 1.0}
    greedy = facts(options={"do_sample": False})
    assert greedy["sampling"]["temperature"] == greedy["inner_sampling"]["temperature"] == 0
    asked = facts(options={"talker_temperature": 0.5, "subtalker_temperature": 0.25, "subtalker_top_k": 3})
    assert asked["sampling"]["temperature"] == 0.5
    assert asked["inner_sampling"] == {"temperature": 0.25, "top_k": 3, "top_p": 1.0}


def test_a_voice_is_found_whatever_its_case_and_a_speaker_of_a_dialect_speaks_it() -> None:
    assert facts(voice="Ryan")["codes"] == facts(options={"speaker": "ryan"})["codes"]
    dialect = facts(voice="eric", options={"language": "sichuan_dialect"})["codes"]
    assert facts(voice="eric")["codes"] == dialect
    assert facts(voice="eric", options={"language": "English"})["codes"] != dialect


def test_models_without_preset_voices_or_with_another_codec_are_refused_by_name(tmp_path: Path) -> None:
    for number, (key, value) in enumerate(
        [("tts_model_type", "base"), ("tts_model_type", "voice_design"), ("tokenizer_type", "25hz")]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        changed: dict[str, Any] = {key: value}
        write_qwen3_tts(folder, **changed)
        with pytest.raises(UnsupportedArchitectureError, match=f"{key}.*{value}"):
            processing.load(folder, max_seq_len=64)
        with pytest.raises(UnsupportedArchitectureError, match=value):
            nodes.examine(folder, "Talker")


def test_small_checkpoints_refuse_instructions(tmp_path: Path) -> None:
    write_qwen3_tts(tmp_path, tts_model_size="0b6")
    small = processing.load(tmp_path, max_seq_len=64)
    asked = {
        "inputs": Inputs(text="hello", output_modalities=["audio"]),
        "params": Params(options={"instructions": "whisper"}),
    }
    with pytest.raises(ClientError, match=r"instructions: checkpoints of 0\.6B follow none"):
        small.run("prepare", "k", {}, asked)
