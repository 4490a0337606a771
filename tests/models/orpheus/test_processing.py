"""The published prompt, voices, sampling, and refused requests."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from models import registry
from models.checkpoints.files import CheckpointError
from models.orpheus.graph import GRAPH
from models.orpheus.processing import OrpheusProcessing, load
from shared.errors import BugError, ClientError
from shared.events import Inputs, Params
from shared.tensors import read_ids
from tests.tiny import tiny_checkpoint
from tests.tiny.orpheus import copied, tiny_orpheus

SAID: dict[str, Any] = {"text": "Hello there.", "output_modalities": ["audio"]}


@pytest.fixture(scope="module")
def processing() -> OrpheusProcessing:
    return load(tiny_orpheus(), max_seq_len=64)


def prepared(
    processing: OrpheusProcessing, params: dict[str, Any] | None = None, **inputs: Any
) -> tuple[list[int], dict[str, Any]]:
    asked = {"inputs": Inputs(**(SAID | inputs)), "params": Params(**(params or {}))}
    result = processing.run("prepare", "k", {}, asked)
    return read_ids(result.handle("token_ids")), dict(result.facts)


@pytest.mark.parametrize(
    ("voice", "spoken"), [(None, "tara"), ("leo", "leo"), ("Zoe", "zoe"), *((v, v) for v in GRAPH.voices)]
)
@pytest.mark.parametrize("chat", [True, False])
def test_a_text_is_wrapped_as_published(
    processing: OrpheusProcessing, voice: str | None, spoken: str, chat: bool
) -> None:
    ids, facts = prepared(processing, {"voice": voice}, chat=chat)

    tokenizer = Tokenizer.from_file(str(tiny_orpheus() / "tokenizer.json"))
    text = tokenizer.encode(f"{spoken}: Hello there.").ids
    assert text[0] == 128000
    assert ids == [128259, *text, 128009, 128260, 128261, 128257]
    assert facts["prompt_tokens"] == len(ids)


def test_the_voices_are_those_published() -> None:
    assert GRAPH.voices == ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe", "julia")


def test_the_error_for_an_unknown_voice_lists_the_voices(processing: OrpheusProcessing) -> None:
    with pytest.raises(ClientError, match=r"expected one of tara, leah, .*, julia; found 'alloy'"):
        prepared(processing, {"voice": "alloy"})


def test_a_deployment_declares_the_voices_of_a_finetune() -> None:
    processing = load(tiny_orpheus(), max_seq_len=64, voices=("Ève", "tara"))

    default, given, other = (prepared(processing, {"voice": name})[0] for name in (None, "ève", "tara"))

    assert default == given != other
    with pytest.raises(ClientError, match="expected one of Ève, tara; found 'leo'"):
        prepared(processing, {"voice": "leo"})


def test_sampling_defaults_are_the_published_ones(processing: OrpheusProcessing) -> None:
    assert json.loads((tiny_orpheus() / "generation_config.json").read_text())["top_p"] == 0.9

    _, facts = prepared(processing)

    assert facts["sampling"] == {"temperature": 0.6, "top_p": 0.8, "top_k": 0, "repetition_penalty": 1.3}


def test_the_request_overrides_the_defaults(processing: OrpheusProcessing) -> None:
    _, facts = prepared(processing, {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, "top_k": 5})

    assert facts["sampling"] == {"temperature": 0.0, "top_p": 1.0, "top_k": 5}


def test_the_end_of_speech_alone_ends_an_answer(processing: OrpheusProcessing) -> None:
    assert processing.eos_ids == (128258,)


def test_audio_tokens_have_no_text(processing: OrpheusProcessing) -> None:
    decoder = processing.text_decoder()

    assert [decoder.push(128266), decoder.push(5), decoder.flush()] == ["", "", ""]
    assert decoder.bytes_of(128266) == b""


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"text": None, "messages": [{"role": "user", "content": "hi"}]}, "takes no messages"),
        ({"text": None, "token_ids": [1, 2]}, "takes no token_ids"),
        ({"text": " \n"}, "the text is empty"),
        ({"text": "\ud800"}, "the text is no valid Unicode"),
        ({"text": "word " * 80}, "context length is 64 tokens"),
        ({"output_modalities": ["text"]}, r"expected output_modalities \['audio'\], found \['text'\]"),
        ({"input_modalities": ["text", "image"]}, "reads text only"),
    ],
)
def test_unsupported_inputs_are_refused(
    processing: OrpheusProcessing, inputs: dict[str, Any], said: str
) -> None:
    with pytest.raises(ClientError, match=said):
        prepared(processing, **inputs)


@pytest.mark.parametrize(
    "params", [{"stop": ["x"]}, {"logprobs": 0}, {"echo": True}, {"guide": {"regex": "a"}}]
)
def test_parameters_of_text_output_are_refused(processing: OrpheusProcessing, params: dict[str, Any]) -> None:
    with pytest.raises(ClientError, match=rf"{next(iter(params))} is a parameter of text output"):
        prepared(processing, params)


def test_an_unknown_node_is_a_bug(processing: OrpheusProcessing) -> None:
    with pytest.raises(BugError, match="no CPU node 'LLM'"):
        processing.run("LLM", "k", {}, {})


def test_a_tokenizer_without_the_marks_is_not_orpheus() -> None:
    with pytest.raises(CheckpointError, match="expected <custom_token_0> as token 128256, found None"):
        load(tiny_checkpoint("llama"), max_seq_len=64)


def test_a_vocabulary_without_audio_is_not_orpheus(tmp_path: Path) -> None:
    path = copied(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 128256}))

    with pytest.raises(CheckpointError, match="expected a vocab_size of 156938 or more, found 128256"):
        load(tmp_path, max_seq_len=64)


# ---- the claim of checkpoints ---------------------------------------------------------------------


def test_a_llama_with_snac_in_its_folder_is_orpheus(tmp_path: Path) -> None:
    assert registry.family_of(tiny_orpheus()) == "orpheus"

    (copied(tmp_path) / "tokenizer_config.json").unlink()
    assert registry.family_of(tmp_path) == "orpheus"


def test_a_llama_with_the_special_tokens_of_orpheus_is_orpheus(tmp_path: Path) -> None:
    (copied(tmp_path) / "snac" / "config.json").unlink()

    assert registry.family_of(tmp_path) == "orpheus"


def test_any_other_llama_is_a_decoder_lm() -> None:
    assert registry.family_of(tiny_checkpoint("llama")) == "decoder_lm"
