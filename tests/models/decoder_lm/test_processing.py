"""`prepare` of decoder_lm, against transformers' own tokenizer on the same files."""

import shutil
import unicodedata
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import AutoTokenizer

from models.checkpoints.files import CheckpointError
from models.decoder_lm import processing
from models.decoder_lm.processing import DecoderLmProcessing
from models.text.chat_template import ChatTemplate, ChatTemplateError
from shared.errors import BugError, ClientError
from shared.events import Inputs, Media, Params
from shared.tensors import read_ids
from tests.models import written_checkpoints

CHATML_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "chat_template": written_checkpoints.CHATML,
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
}
LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}<<{{ m.content }}>>\n"
    "{% continue %}{% endif %}[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
LLAMA_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "chat_template": [
        {"name": "tool_use", "template": "{{ raise_exception('not this one') }}"},
        {"name": "default", "template": LLAMA_TEMPLATE},
    ],
    "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
    "eos_token": "</s>",
    "unk_token": "<unk>",
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "What does len do?"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    "turns": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "  hello there \n"},
        {"role": "user", "content": "and again"},
    ],
    "unicode": [{"role": "user", "content": "Grüße 👩‍👩‍👧‍👦 你好 e\u0301 \u200d <|im_end|> \x00"}],
    "nulls and names": [
        {"role": "user", "content": "x", "name": None},
        {"role": "user", "content": "<b>ü</b>"},
    ],
    "empty content": [{"role": "user", "content": ""}],
}


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_checkpoints.save(
        tmp_path_factory.mktemp("chatml"), written_checkpoints.byte_level(), CHATML_CONFIG
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_checkpoints.save(
        tmp_path_factory.mktemp("llama"), written_checkpoints.sentence_piece(), LLAMA_CONFIG
    )


@pytest.fixture(params=["chatml", "llama"])
def folder(request: pytest.FixtureRequest) -> Path:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Path)
    return found


def load(folder: Path, max_seq_len: int = 512) -> DecoderLmProcessing:
    return processing.load(folder, max_seq_len=max_seq_len)


def prepare(loaded: DecoderLmProcessing, inputs: Inputs, params: Params | None = None) -> list[int]:
    args = {"inputs": inputs, "params": params or Params()}
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(args))  # as they arrive: plain maps
    result = loaded.run("prepare", "r/1/0/prepare", {}, wire)
    handle = result.handle("token_ids")
    assert handle.key == "r/1/0/prepare/token_ids"
    ids = read_ids(handle)
    assert result.facts["prompt_tokens"] == len(ids)
    return ids


@pytest.mark.parametrize("chat", CHATS)
def test_a_chat_is_encoded_as_by_transformers(folder: Path, chat: str) -> None:
    oracle = AutoTokenizer.from_pretrained(folder)
    expected = oracle.apply_chat_template(CHATS[chat], add_generation_prompt=True, return_dict=False)

    assert prepare(load(folder), Inputs(messages=CHATS[chat])) == expected
    assert len(expected) > 5


@pytest.mark.parametrize("text", ["What does len do?", " x", "你好 👋🏽", "<s> </s><|im_end|>"])
@pytest.mark.parametrize("frame", [{}, {"add_bos_token": False, "add_eos_token": True}])
def test_a_raw_prompt_is_encoded_as_by_transformers(
    text: str, frame: dict[str, bool], tmp_path: Path
) -> None:
    """The post-processor in the tokenizer file (a leading `<s>`) overrides older settings."""
    folder = written_checkpoints.save(tmp_path, written_checkpoints.sentence_piece(), LLAMA_CONFIG | frame)

    ids = prepare(load(folder), Inputs(text=text, chat=False))

    assert ids == AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert ids[0] == 1


def test_a_text_is_one_user_message_when_chat_is_on(chatml: Path) -> None:
    loaded = load(chatml)

    assert prepare(loaded, Inputs(text="hi")) == prepare(
        loaded, Inputs(messages=[{"role": "user", "content": "hi"}])
    )


def test_text_parts_are_joined(chatml: Path) -> None:
    loaded = load(chatml)
    parts = [{"type": "text", "text": "What does "}, {"type": "text", "text": "len do?"}]

    assert prepare(loaded, Inputs(messages=[{"role": "user", "content": parts}])) == prepare(
        loaded, Inputs(text="What does len do?")
    )


def test_a_template_file_comes_before_the_one_in_the_config(tmp_path: Path) -> None:
    folder = written_checkpoints.save(tmp_path, written_checkpoints.byte_level(), CHATML_CONFIG)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!", encoding="utf-8")

    expected = written_checkpoints.byte_level().encode("hi!").ids
    assert prepare(load(folder), Inputs(text="hi")) == expected


def test_token_ids_pass_as_they_are(chatml: Path) -> None:
    assert prepare(load(chatml), Inputs(token_ids=[5, 6, 7])) == [5, 6, 7]


def test_token_ids_may_reach_as_far_as_the_models_vocabulary(tmp_path: Path) -> None:
    folder = written_checkpoints.save(
        tmp_path, written_checkpoints.byte_level(), CHATML_CONFIG, config={"vocab_size": 1000}
    )

    assert prepare(load(folder), Inputs(token_ids=[999])) == [999]
    with pytest.raises(ClientError, match="token id 1000 is outside the model's vocabulary of 1000"):
        prepare(load(folder), Inputs(token_ids=[3, 1000]))


def test_padding_and_truncation_of_the_tokenizer_file_do_not_apply(tmp_path: Path) -> None:
    tokenizer = written_checkpoints.byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=20)
    folder = written_checkpoints.save(tmp_path, tokenizer, CHATML_CONFIG)

    expected = written_checkpoints.byte_level().encode("What does len do?").ids
    assert prepare(load(folder), Inputs(text="What does len do?", chat=False)) == expected


def text_of(loaded: DecoderLmProcessing, inputs: Inputs, echo: bool | Literal["ids"] = True) -> object:
    args = msgspec.to_builtins({"inputs": inputs, "params": Params(echo=echo)})
    return loaded.run("prepare", "k", {}, args).facts["prompt_text"]


def test_the_echoed_text_is_the_given_text(llama: Path) -> None:
    """Decoding the tokens would give another text: this tokenizer loses a leading space."""
    loaded, text = load(llama), "  Grüße \x00 e\u0301"

    assert text_of(loaded, Inputs(text=text, chat=False)) == text


def test_the_echoed_text_of_token_ids_includes_special_tokens(chatml: Path) -> None:
    ids = written_checkpoints.byte_level().encode("<|im_start|>What does len do?").ids

    assert text_of(load(chatml), Inputs(token_ids=ids)) == "<|im_start|>What does len do?"


def test_the_echoed_text_of_a_chat_is_the_rendered_prompt(chatml: Path) -> None:
    found = text_of(load(chatml), Inputs(text="hi"))

    assert isinstance(found, str)
    assert found.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_an_echo_of_ids_has_no_text(chatml: Path) -> None:
    assert text_of(load(chatml), Inputs(token_ids=[5]), "ids") == ""


def test_without_an_echo_no_text_is_reported(chatml: Path) -> None:
    args = msgspec.to_builtins({"inputs": Inputs(text="hi"), "params": Params()})

    assert set(load(chatml).run("prepare", "k", {}, args).facts) == {"prompt_tokens", "sampling"}


def test_a_prompt_as_long_as_the_context_may_be_echoed_alone(chatml: Path) -> None:
    loaded, inputs = load(chatml), Inputs(token_ids=[5] * 512)

    assert len(prepare(loaded, inputs, Params(max_tokens=0, echo=True))) == 512
    with pytest.raises(ClientError, match="512"):
        prepare(loaded, Inputs(token_ids=[5] * 513), Params(max_tokens=0, echo=True))


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "empty text": ({"text": "", "chat": False}, "invalid_request", "empty"),
    "no tokens": ({"token_ids": []}, "invalid_request", "empty"),
    "no messages": ({"messages": []}, "invalid_request", "at least one message"),
    "no role": ({"messages": [{"content": "x"}]}, "invalid_request", r"messages\[0\].*'role'"),
    "no content": ({"messages": [{"role": "user"}]}, "invalid_request", r"messages\[0\].*'content'"),
    "a number": ({"messages": [{"role": "user", "content": 3}]}, "invalid_request", "found int"),
    "a bare part": ({"messages": [{"role": "user", "content": ["x"]}]}, "invalid_request", r"content\[0\]"),
    "a part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "invalid_request",
        "found NoneType",
    ),
    "an image part": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "unsupported_modality",
        "image_url",
    ),
    "a file": (
        {"text": "x", "files": [Media(modality="image", digest="0" * 64)]},
        "unsupported_modality",
        "image",
    ),
    "an input modality": (
        {"text": "x", "input_modalities": ["text", "audio"]},
        "unsupported_modality",
        "audio",
    ),
    "an output modality": ({"text": "x", "output_modalities": ["video"]}, "unsupported_modality", "video"),
    "a role the template refuses": (
        {"messages": [{"role": "wizard", "content": "x"}]},
        "chat_template_error",
        "Unexpected role: wizard",
    ),
    "too long": ({"token_ids": [5] * 512}, "context_length_exceeded", "512"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_impossible_request_is_a_typed_client_error(chatml: Path, case: str) -> None:
    inputs, code, message = BAD[case]

    with pytest.raises(ClientError, match=message) as caught:
        prepare(load(chatml), Inputs(**inputs))
    status = 422 if code == "chat_template_error" else 400  # which is well formed, and not for this template
    assert (caught.value.failure_code, caught.value.failure_status) == (code, status)


@pytest.mark.parametrize("modality", ["embedding", "hidden_states"])
def test_prompt_outputs_cannot_be_combined_with_an_answer(chatml: Path, modality: str) -> None:
    loaded, asked = load(chatml), Inputs(token_ids=[5] * 512, output_modalities=[modality])

    assert len(prepare(loaded, asked)) == 512  # none is left for an answer
    for params in (Params(echo=True), Params(logprobs=1), Params(warm=True)):
        with pytest.raises(ClientError, match=f"together with {modality}, which is no answer"):
            prepare(loaded, asked, params)
    both = msgspec.structs.replace(asked, output_modalities=["text", modality])
    with pytest.raises(ClientError, match="generates text, makes an embedding, or returns hidden states"):
        prepare(loaded, both)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"truncate_prompt_tokens": 4}, slice(0, 4)),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, slice(-4, None)),
        ({"truncate_prompt_tokens": -1}, slice(0, 512)),
        ({"truncate_prompt_tokens": 10_000}, slice(0, 512)),
        ({"truncation_side": "left"}, slice(-512, None)),
    ],
)
def test_a_text_to_embed_is_cut_as_the_request_asks(
    chatml: Path, params: dict[str, Any], kept: slice
) -> None:
    loaded = load(chatml)
    text = "".join(f" {number}" for number in range(700))
    whole = Tokenizer.from_file(str(chatml / "tokenizer.json")).encode(text, add_special_tokens=False).ids

    asked: dict[str, Any] = {"chat": False, "output_modalities": ["embedding"]}
    found = prepare(loaded, Inputs(text=text, **asked), Params(**params))
    assert found == whole[kept]
    assert prepare(loaded, Inputs(token_ids=whole, **asked), Params(**params)) == whole[kept]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"truncate_prompt_tokens": 4}, slice(0, 4)),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, slice(-4, None)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 12}, slice(0, 500)),
        ({"truncate_prompt_tokens": -1}, slice(0, 511)),
    ],
)
def test_a_prompt_is_cut_so_that_its_answer_has_room(
    chatml: Path, params: dict[str, Any], kept: slice
) -> None:
    loaded = load(chatml)
    text = "".join(f" {number}" for number in range(700))
    whole = Tokenizer.from_file(str(chatml / "tokenizer.json")).encode(text, add_special_tokens=False).ids

    assert prepare(loaded, Inputs(text=text, chat=False), Params(**params)) == whole[kept]
    assert prepare(loaded, Inputs(token_ids=whole), Params(**params)) == whole[kept]


def test_of_a_chat_the_end_is_kept_where_its_answer_begins(chatml: Path) -> None:
    loaded, asked = load(chatml), Inputs(messages=[{"role": "user", "content": "one two three four"}])
    whole = prepare(loaded, asked)

    assert prepare(loaded, asked, Params(truncate_prompt_tokens=4)) == whole[-4:]
    with pytest.raises(ClientError, match="expected 'left' for a chat"):
        prepare(loaded, asked, Params(truncate_prompt_tokens=4, truncation_side="right"))


def test_special_tokens_stay_when_a_text_is_cut(llama: Path) -> None:
    loaded = load(llama)
    asked = Inputs(text="one two three four", chat=False, output_modalities=["embedding"])
    whole, cut = prepare(loaded, asked), prepare(loaded, asked, Params(truncate_prompt_tokens=3))
    assert (len(cut), cut) == (3, whole[:3])
    left = prepare(loaded, asked, Params(truncate_prompt_tokens=3, truncation_side="left"))
    assert left == [whole[0], *whole[-2:]]
    with pytest.raises(ClientError, match="more than the 1 special tokens"):
        prepare(loaded, asked, Params(truncate_prompt_tokens=1))


def test_hidden_states_are_not_cut_to_an_embeddings_size(chatml: Path) -> None:
    asked = Inputs(text="x", output_modalities=["hidden_states"])

    with pytest.raises(ClientError, match="dimensions: expected none"):
        prepare(load(chatml), asked, Params(dimensions=8))


def test_too_many_hidden_states_for_the_log_are_refused(chatml: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(chatml, tmp_path / "wide")
    (folder / "config.json").write_text('{"hidden_size": 1048576}')
    loaded = load(folder)

    assert prepare(loaded, Inputs(token_ids=[5] * 4, output_modalities=["hidden_states"]))
    with pytest.raises(ClientError, match="at most 4 tokens, whose states are 16 MiB, found 5") as refused:
        prepare(loaded, Inputs(token_ids=[5] * 5, output_modalities=["hidden_states"]))
    assert (refused.value.failure_code, refused.value.failure_status) == ("hidden_states_too_large", 413)
    assert prepare(loaded, Inputs(token_ids=[5] * 5, output_modalities=["embedding"]))


@pytest.mark.parametrize("kept", ["chatml", "llama"])
def test_a_text_that_is_too_long_is_refused_with_its_length(
    kept: str, request: pytest.FixtureRequest
) -> None:
    """Refused before it is encoded if the bytes per token are bounded: 8 MB took 15 s, and others waited."""
    loaded = load(request.getfixturevalue(kept))
    counted = {"chatml": "at least", "llama": r"alone has \d+;"}[kept]

    with pytest.raises(ClientError, match=counted) as caught:
        prepare(loaded, Inputs(text="x" * 100_000, chat=False))
    assert (caught.value.failure_code, caught.value.failure_status) == ("context_length_exceeded", 400)


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.NFKC()])
def test_a_text_that_fits_is_not_refused(tmp_path: Path, normalizer: normalizers.Normalizer | None) -> None:
    tokenizer = written_checkpoints.byte_level()
    longest = "<|a-very-long-token-of-this-vocabulary|>"
    tokenizer.add_tokens([AddedToken(longest, normalized=False)])
    composed = "\u1f82"  # of four characters in NFD: two tokens each at most, of three bytes
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    loaded = load(written_checkpoints.save(tmp_path, tokenizer), 1024)

    assert len(prepare(loaded, Inputs(text=longest * 1023, chat=False))) == 1023
    if normalizer is not None:
        assert prepare(loaded, Inputs(text=unicodedata.normalize("NFD", composed) * 300, chat=False))


def test_a_lone_surrogate_is_a_client_error(chatml: Path) -> None:
    with pytest.raises(ClientError, match="lone surrogate"):
        load(chatml).run("prepare", "k", {}, {"inputs": Inputs(text="\ud800"), "params": Params()})


def test_a_malformed_request_is_a_client_error(chatml: Path) -> None:
    with pytest.raises(ClientError, match="malformed"):
        load(chatml).run("prepare", "k", {}, {"inputs": {"text": 3}, "params": {}})


def test_an_unknown_node_is_a_bug(chatml: Path) -> None:
    with pytest.raises(BugError, match="llm"):
        load(chatml).run("llm", "k", {}, {})


def test_without_a_template_a_chat_says_what_to_do_and_a_raw_prompt_works(tmp_path: Path) -> None:
    loaded = load(written_checkpoints.save(tmp_path, written_checkpoints.byte_level()))

    with pytest.raises(ClientError, match="/v1/completions") as caught:
        prepare(loaded, Inputs(text="hi"))
    assert (caught.value.failure_code, caught.value.failure_status) == ("no_chat_template", 422)
    assert prepare(loaded, Inputs(text="hi", chat=False)) == written_checkpoints.byte_level().encode("hi").ids


# ---- sampling and stop ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "params", "expected"),
    [
        ({}, {}, (1.0, 1.0, 0)),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, {}, (0.6, 0.9, 20)),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, {"temperature": 0.0, "top_k": -1}, (0.0, 0.9, 0)),
        ({"do_sample": False, "temperature": 0.6}, {}, (0.0, 1.0, 0)),
        ({"do_sample": False}, {"temperature": 0.7}, (0.7, 1.0, 0)),
        ({"do_sample": True, "temperature": None}, {"top_p": 0.5}, (1.0, 0.5, 0)),
    ],
)
def test_the_request_overrides_the_checkpoint_which_overrides_the_defaults(
    tmp_path: Path, generation: dict[str, Any], params: dict[str, Any], expected: tuple[float, float, int]
) -> None:
    folder = written_checkpoints.save(
        tmp_path, written_checkpoints.byte_level(), generation_config=generation
    )
    args = {"inputs": Inputs(text="x", chat=False), "params": Params(**params)}

    facts = load(folder).run("prepare", "k", {}, args).facts

    temperature, top_p, top_k = expected
    assert facts["sampling"] == {"temperature": temperature, "top_p": top_p, "top_k": top_k}


PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


def sampling_of(folder: Path, **params: Any) -> dict[str, Any]:
    """The other sampling parameters, in the form of the wire."""
    args = msgspec.to_builtins({"inputs": Inputs(text="x", chat=False), "params": Params(**params)})
    facts = msgspec.msgpack.decode(msgspec.msgpack.encode(load(folder).run("prepare", "k", {}, args).facts))
    sampling: dict[str, Any] = facts["sampling"]
    assert {name: sampling.pop(name) for name in PLAIN} == PLAIN
    return sampling


@pytest.mark.parametrize(
    ("generation", "params", "expected"),
    [
        ({"min_p": 0.1, "repetition_penalty": 1.1}, {}, {"min_p": 0.1, "repetition_penalty": 1.1}),
        ({"min_p": 0.1, "repetition_penalty": 1.1}, {"min_p": 0, "repetition_penalty": 1}, {}),
        ({"min_p": None, "repetition_penalty": 1.0}, {"min_p": 0.2}, {"min_p": 0.2}),
        (
            {"min_new_tokens": 4, "bad_words_ids": [[5], [6, 7]]},
            {},
            {"min_tokens": 4, "bad_words": [[5], [6, 7]]},
        ),
        ({"min_new_tokens": 4, "bad_words_ids": [[5]]}, {"min_tokens": 0, "bad_words": []}, {}),
        ({}, {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}}, {}),
        (
            {},
            {"presence_penalty": -0.5, "frequency_penalty": 2, "logit_bias": {"12": 1, "9": -100}},
            {"presence_penalty": -0.5, "frequency_penalty": 2, "logit_bias": [[9, -100], [12, 1]]},
        ),
        ({}, {"bad_words": [[5, 6], [7]], "min_tokens": 3}, {"bad_words": [[5, 6], [7]], "min_tokens": 3}),
    ],
)
def test_parameters_without_effect_are_absent(
    tmp_path: Path, generation: dict[str, Any], params: dict[str, Any], expected: dict[str, Any]
) -> None:
    folder = written_checkpoints.save(
        tmp_path, written_checkpoints.byte_level(), generation_config=generation
    )

    assert sampling_of(folder, **params) == expected


def test_a_bad_word_is_spelled_as_it_is_and_after_a_space(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = [
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("len", " len", "two  items")
    ]

    found = sampling_of(folder, bad_words=["len", "two  items", "len"])["bad_words"]

    assert found[:3] == expected
    assert len(found) == 4  # each spelling once


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"logit_bias": {"5000": 1.0}}, "logit_bias: token id 5000 is outside the model's vocabulary of"),
        ({"bad_words": ["a", [1, 5000]]}, r"bad_words\[1\]: token id 5000 is outside"),
        ({"stop_token_ids": [1, 5000]}, "stop_token_ids: token id 5000 is outside"),
        ({"bad_words": ["\ud800"]}, r"bad_words\[0\] is no valid Unicode text"),
    ],
)
def test_invalid_token_ids_and_words_are_refused_by_name(
    chatml: Path, params: dict[str, Any], said: str
) -> None:
    with pytest.raises(ClientError, match=said):
        load(chatml).run(
            "prepare", "k", {}, {"inputs": Inputs(text="x", chat=False), "params": Params(**params)}
        )


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [2, 0]}, "config": {"eos_token_id": 1}}, (2, 0)),
        ({"config": {"eos_token_id": 1}}, (1,)),
        ({}, (2,)),
    ],
)
def test_eos_ids_of_the_generation_config_precede_those_of_model_and_tokenizer(
    tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    folder = written_checkpoints.save(
        tmp_path, written_checkpoints.byte_level(), {"eos_token": "<|im_end|>"}, **files
    )

    assert load(folder).eos_ids == expected


# ---- broken checkpoints --------------------------------------------------------------------------


def test_ignored_settings_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(
        written_checkpoints.save(
            tmp_path, written_checkpoints.byte_level(), generation_config={"typical_p": 0.9}
        )
    )

    assert (
        "asks for what is not applied, so answers may differ from transformers': typical_p=0.9" in caplog.text
    )


def test_no_tokenizer_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json; make one with"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "[1]", "expected a JSON object, found list"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
        ("generation_config.json", '{"top_p": 7}', "generation_config.json"),
        ("generation_config.json", '{"repetition_penalty": -1}', "repetition_penalty: expected a number >= "),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id, found 'x'"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    folder = written_checkpoints.save(tmp_path, written_checkpoints.byte_level())
    (folder / name).write_text(content, encoding="utf-8")

    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_template_that_is_no_jinja_is_refused_at_load(tmp_path: Path) -> None:
    folder = written_checkpoints.save(
        tmp_path, written_checkpoints.byte_level(), {"chat_template": "{% if %}"}
    )

    with pytest.raises(ChatTemplateError, match=r"tokenizer_config\.json is no valid Jinja"):
        load(folder)


# ---- templates -----------------------------------------------------------------------------------


def render(source: str, **message: Any) -> str:
    return ChatTemplate(source, {}, origin="a test").render([{"role": "user", "content": "x"} | message])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}{{ undefined_thing() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


def test_a_template_that_fails_as_a_program_is_a_client_error() -> None:
    with pytest.raises(ChatTemplateError, match="TypeError"):
        render("{{ messages[0].content + 1 }}")


def test_a_template_may_ask_for_the_date_and_write_json() -> None:
    rendered = render(
        "{{ strftime_now('%Y')|int > 2000 }} {{ messages[0].data | tojson }}", data={"ü": "<&>"}
    )

    assert rendered == 'True {"ü": "<&>"}'
