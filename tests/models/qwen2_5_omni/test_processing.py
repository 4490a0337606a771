"""Prompts of thinker and talker, defaults, and requests that are refused before anything is computed."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import (
    _get_feat_extract_output_lengths as rows_of_transformers,
)

from models.checkpoints.files import UnsupportedArchitectureError
from models.media.kinds import MediaError
from models.omni.prepared import talker_sampling
from models.qwen2_5_omni import nodes, processing
from models.qwen2_5_omni.graph import GRAPH
from models.qwen2_5_omni.options import Qwen25OmniOptions
from models.qwen2_5_omni.processing import rows_of
from models.qwen2_5_omni.weight_files import weight_files
from models.registry import family_of
from models.sequence_request import PrepareRequest
from shared.errors import ClientError
from shared.events import Inputs, Params
from shared.tensors import read_ids
from tests.models.omni.serving import Asked
from tests.models.qwen2_5_omni.serving import SERVED
from tests.tiny import qwen2_5_omni as tiny


def prepared(inputs: Inputs, **params: Any) -> Any:
    args = msgspec.to_builtins(PrepareRequest(inputs=inputs, params=Params(**params)))
    return SERVED.prepares.run("prepare", "k", {}, args)


def spoken(text: str, **params: Any) -> Any:
    return prepared(Inputs(text=text, output_modalities=["text", "audio"]), **params)


def test_the_talker_hears_the_whole_prompt_and_then_the_token_of_its_voice() -> None:
    result = spoken("hello", voice="ethan")
    ids, heard = read_ids(result.handle("token_ids")), read_ids(result.handle("talker_ids"))
    speech = result.facts["speech"]
    assert heard[:-2] == ids
    assert speech["prompt_tokens"] == len(heard)
    assert (speech["voice"], speech["end_codes"]) == ("Ethan", [tiny.CODE_PAD, tiny.CODE_END])
    assert speech["speaker"] != spoken("hello").facts["speech"]["speaker"]
    assert spoken("hello").facts["speech"]["voice"] == "Chelsie"


@pytest.mark.parametrize(
    ("inputs", "params", "problem"),
    [
        ({"text": "hi"}, {"voice": "nobody"}, "expected one of Chelsie, Ethan; found 'nobody'"),
        ({"text": "hi"}, {"warm": True}, "leave out warm and echo"),
        ({"text": "hi", "output_modalities": ["audio", "image"]}, {}, "expected text, audio or both"),
    ],
)
def test_speech_that_cannot_be_made_is_refused(inputs: Any, params: Any, problem: str) -> None:
    with pytest.raises(ClientError, match=problem):
        prepared(Inputs(**{"output_modalities": ["text", "audio"], **inputs}), **params)


@pytest.mark.parametrize(("samples", "problem"), [(20, "makes 0 tokens"), (480_001, "at most 30 s")])
def test_sound_without_a_token_and_sound_beyond_the_limit_are_refused(samples: int, problem: str) -> None:
    with pytest.raises(MediaError, match=problem):
        SERVED.prompt_of(Asked("?", (np.zeros(samples, np.float32),), voice="Ethan"))


def test_the_rows_of_sound_are_those_of_transformers() -> None:
    assert [rows_of(frames) for frames in range(1, 450)] == [
        rows_of_transformers(frames) for frames in range(1, 450)
    ]


def test_defaults_are_those_of_transformers() -> None:
    assert msgspec.to_builtins(talker_sampling(Qwen25OmniOptions())) == {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.8,
        "repetition_penalty": 1.05,
    }


def test_the_folder_is_served_by_the_family_and_its_voices_are_weights() -> None:
    folder = tiny.tiny_qwen2_5_omni()
    assert family_of(folder) == GRAPH.family
    assert "spk_dict.pt" in weight_files(folder, "Talker", {})
    assert nodes.examine(folder, "Thinker", members=2) == nodes.examine(folder, "Talker") == 4096


def changed(folder: Path, **config: Any) -> Path:
    """The checkpoint with another `config.json`."""
    folder.mkdir()
    for path in tiny.tiny_qwen2_5_omni().iterdir():
        (folder / path.name).symlink_to(path)
    found = msgspec.json.decode((folder / "config.json").read_bytes())
    (folder / "config.json").unlink()
    (folder / "config.json").write_bytes(msgspec.json.encode(found | config))
    return folder


def test_the_published_name_of_the_architecture_is_served(tmp_path: Path) -> None:
    folder = changed(tmp_path / "published", architectures=["Qwen2_5OmniModel"])
    assert family_of(folder) == GRAPH.family
    assert nodes.load(folder, "Talker").architecture == "Qwen2_5OmniTalkerForConditionalGeneration"


def test_a_checkpoint_that_only_thinks_speaks_not(tmp_path: Path) -> None:
    folder = changed(tmp_path / "thinks", enable_audio_output=False)
    (folder / "spk_dict.pt").unlink()
    silent = processing.load(folder, max_seq_len=512, media=None)
    args = PrepareRequest(inputs=Inputs(text="hi", output_modalities=["audio"]), params=Params())
    with pytest.raises(ClientError, match="thinks and does not speak"):
        silent.run("prepare", "k", {}, msgspec.to_builtins(args))
    with pytest.raises(UnsupportedArchitectureError, match="only thinks"):
        nodes.load(folder, "Talker")
    assert nodes.load(folder, "Thinker").architecture


def test_the_penalty_counts_the_codes_of_the_prompt_of_transformers() -> None:
    assert spoken("hello").facts["speech"]["penalized_ids"] == [206, tiny.CODE_PAD, 203]
