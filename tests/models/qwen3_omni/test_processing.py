"""Prompts of thinker and talker, defaults, and requests that are refused before anything is computed."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError
from models.media.kinds import MediaError, MediaTooLargeError
from models.omni.prepared import talker_sampling
from models.qwen3_omni import nodes, processing
from models.qwen3_omni.graph import GRAPH, SPEAKING
from models.qwen3_omni.options import Qwen3OmniOptions
from models.qwen3_omni.processing import rows_of
from models.qwen3_omni.sampling import predictor_sampling
from models.qwen3_omni.speech_prompts import SpeechPrompts
from models.registry import family_of
from models.sequence_request import PrepareRequest
from shared.errors import ClientError
from shared.events import Inputs, Limits, Params
from shared.plans import PlanRequest
from shared.tensors import read_ids
from tests.models.omni.serving import Asked
from tests.models.qwen3_omni.serving import SERVED
from tests.tiny import omni


def prepared(inputs: Inputs, **params: Any) -> Any:
    args = msgspec.to_builtins(PrepareRequest(inputs=inputs, params=Params(**params)))
    return SERVED.prepares.run("prepare", "k", {}, args)


def spoken(*messages: tuple[str, str], **params: Any) -> Any:
    chat = [{"role": role, "content": text} for role, text in messages]
    return prepared(Inputs(messages=chat, output_modalities=["text", "audio"]), **params)


def test_the_talker_hears_all_turns_of_the_user_and_no_other() -> None:
    result = spoken(
        ("system", "Be brief."), ("user", "hello"), ("assistant", "there"), ("user", "how are you")
    )
    ids, heard = read_ids(result.handle("token_ids")), read_ids(result.handle("talker_ids"))
    spans = result.facts["speech"]["spans"]
    assert len(spans) == 2
    assert heard[:-9] == [one for start, end in spans for one in ids[start:end]]
    assert len(set(heard[-9:])) == 1
    assert result.facts["speech"]["prompt_tokens"] == len(heard)
    assert ids[spans[0][0] - 1] != ids[spans[0][0]]


def test_a_text_is_a_turn_of_the_user_where_the_answer_is_spoken() -> None:
    text = prepared(Inputs(text="hello", chat=False, output_modalities=["audio"]))
    chat = spoken(("user", "hello"))
    assert read_ids(text.handle("token_ids")) == read_ids(chat.handle("token_ids"))
    raw = prepared(Inputs(text="hello", chat=False))
    assert len(read_ids(raw.handle("token_ids"))) < len(read_ids(text.handle("token_ids")))
    assert read_ids(raw.handle("talker_ids")) == []


def test_voices_are_known_in_any_case_and_the_default_is_ethan() -> None:
    speakers = [spoken(("user", "hi"), voice=name).facts["speech"]["speaker"] for name in ("aiden", "Aiden")]
    assert speakers == [omni.SPEAKERS["aiden"]] * 2
    assert spoken(("user", "hi")).facts["speech"]["speaker"] == omni.SPEAKERS["ethan"]


@pytest.mark.parametrize(
    ("inputs", "params", "problem"),
    [
        ({"text": "hi"}, {"voice": "nobody"}, "expected one of Aiden, Chelsie, Ethan; found 'nobody'"),
        ({"token_ids": [1, 2, 3, 4]}, {}, "ends with the begin of the assistant's turn"),
        ({"text": "hi"}, {"warm": True}, "leave out warm and echo"),
        ({"text": "hi", "output_modalities": ["audio", "image"]}, {}, "expected text, audio or both"),
    ],
)
def test_speech_that_cannot_be_made_is_refused(inputs: Any, params: Any, problem: str) -> None:
    with pytest.raises(ClientError, match=problem):
        prepared(Inputs(**{"output_modalities": ["text", "audio"], **inputs}), **params)


def test_audio_without_a_token_and_audio_beyond_the_context_are_refused() -> None:
    for samples in (20, 200, 16_000 * 60):
        with pytest.raises(MediaError, match="tokens, expected from 1 to 512") as refused:
            SERVED.prompt_of(Asked("?", (np.zeros(samples, np.float32),)))
        assert isinstance(refused.value, MediaTooLargeError) == (samples > 200)


def test_the_rows_of_audio_are_those_of_transformers() -> None:
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (  # noqa: PLC0415 - takes a second
        _get_feat_extract_output_lengths as theirs,
    )

    assert [rows_of(frames, 100) for frames in range(1, 450)] == [theirs(frames) for frames in range(1, 450)]


def test_m_stars_names_and_defaults_are_those_of_the_family() -> None:
    options = Qwen3OmniOptions()
    assert msgspec.to_builtins(talker_sampling(options)) == {
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 1.0,
        "repetition_penalty": 1.05,
    }
    assert msgspec.to_builtins(predictor_sampling(options)) == {"temperature": 1.0, "top_k": 50, "top_p": 0.8}
    greedy = predictor_sampling(Qwen3OmniOptions(talker_temperature=0.0))
    assert greedy.temperature == 0
    sampling = spoken(("user", "hi")).facts["sampling"]
    assert (sampling["temperature"], sampling["top_p"]) == (0.7, 0.9)
    own = spoken(("user", "hi"), options={"thinker_temperature": 0.2, "thinker_top_p": 0.5}).facts["sampling"]
    assert (own["temperature"], own["top_p"]) == (0.2, 0.5)
    first = spoken(("user", "hi"), temperature=0.1, options={"thinker_temperature": 0.2}).facts["sampling"]
    assert first["temperature"] == 0.1


@pytest.mark.parametrize(("running", "frames"), [(0, 4), (4, 4), (5, 8), (16, 8), (17, 16), (33, 25)])
def test_the_first_chunk_grows_with_the_requests_that_run(running: int, frames: int) -> None:
    def request(**options: int) -> PlanRequest:
        return PlanRequest(
            request_id="r",
            inputs=Inputs(text="hi"),
            params=Params(options=dict(options)),
            limits=Limits(max_seq_len=9, kv_tokens=9, default_max_tokens=9, concurrent=running),
            seed=0,
        )

    assert SPEAKING.first(request()) == frames
    assert SPEAKING.first(request(initial_codec_chunk_frames=3)) == 3


def test_a_checkpoint_is_served_by_the_family_and_one_that_only_thinks_speaks_not(tmp_path: Path) -> None:
    assert family_of(omni.tiny_omni()) == GRAPH.family
    folder = tmp_path / "thinks"
    folder.mkdir()
    for path in omni.tiny_omni().iterdir():
        (folder / path.name).symlink_to(path)
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    (folder / "config.json").unlink()
    (folder / "config.json").write_bytes(msgspec.json.encode(config | {"enable_audio_output": False}))
    silent = processing.load(folder, max_seq_len=512, media=None)
    args = PrepareRequest(inputs=Inputs(text="hi", output_modalities=["audio"]), params=Params())
    with pytest.raises(ClientError, match="thinks and does not speak"):
        silent.run("prepare", "k", {}, msgspec.to_builtins(args))
    with pytest.raises(UnsupportedArchitectureError, match="only thinks"):
        nodes.load(folder, "Talker")


def test_a_talker_is_not_shared_and_a_thinker_can_be() -> None:
    assert nodes.examine(omni.tiny_omni(), "Thinker", members=2) == 4096
    with pytest.raises(UnsupportedArchitectureError, match="Talker is not shared by 2 ranks"):
        nodes.examine(omni.tiny_omni(), "Talker", members=2)


def test_a_config_without_speakers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"talker_config": {}}')
    with pytest.raises(CheckpointError, match="speaker_id"):
        SpeechPrompts.read(tmp_path)
