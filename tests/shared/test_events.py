"""Events that clients may publish on the public subjects, and those that are refused."""

from typing import Any

import msgspec
import pytest

from shared.events import (
    MAX_MESSAGE_CHARS,
    Failure,
    Guide,
    Inputs,
    MalformedEventError,
    Params,
    RequestCancel,
    RequestSubmitted,
    RequestWatched,
    decode,
    encode,
    submission_digest,
)
from shared.subject_rules import EVENT_TYPES
from tests.hostile import NO_TOKENS

GOOD: dict[str, Any] = {"model": "demo", "inputs": {"text": "hi"}}


def nested(levels: int) -> Any:
    value: Any = "deep"
    for _ in range(levels):
        value = [value]
    return value


def saying(**fields: Any) -> dict[str, Any]:
    return GOOD | {"inputs": {"messages": [{"role": "user", "content": "hi"} | fields]}}


def test_a_submission_may_leave_out_all_but_model_and_input() -> None:
    event = decode(msgspec.msgpack.encode(GOOD), "request")
    assert isinstance(event, RequestSubmitted)
    assert (event.origin, event.writer) == ("nats", "")
    assert decode(msgspec.json.encode(GOOD), "request") == event


@pytest.mark.parametrize("origin", NO_TOKENS.values(), ids=NO_TOKENS)
def test_an_origin_that_is_no_subject_token_is_refused(origin: str) -> None:
    with pytest.raises(MalformedEventError, match=r"\$\.origin"):
        decode(msgspec.msgpack.encode(GOOD | {"origin": origin}), "request")


@pytest.mark.parametrize("kind", ["request", "control"])
def test_nobody_else_writes_as_the_conductor(kind: str) -> None:
    body = msgspec.msgpack.encode((GOOD if kind == "request" else {}) | {"writer": "conductor"})
    with pytest.raises(MalformedEventError, match=r"\$\.writer"):
        decode(body, kind)


@pytest.mark.parametrize(
    "content",
    [
        {1: "a key that is no string"},
        b"bytes",
        msgspec.msgpack.Ext(5, b"x"),
        float("nan"),
        float("inf"),
        nested(40),
        nested(900),
    ],
)
def test_messages_say_only_what_json_can_say(content: Any) -> None:
    with pytest.raises(MalformedEventError, match="messages"):
        decode(msgspec.msgpack.encode(saying(content=content)), "request")


def test_a_number_beyond_64_bits_is_refused() -> None:
    body = b'{"model":"demo","inputs":{"messages":[{"role":"user","content":"hi","n":' + b"9" * 30 + b"}]}}"
    with pytest.raises(MalformedEventError, match="64 bits"):
        decode(body, "request")


@pytest.mark.parametrize(
    "content", ["hi", None, [{"type": "text", "text": "hi"}], nested(28), 2**64 - 1, 1.5]
)
def test_what_json_can_say_is_taken_and_can_be_written_again(content: Any) -> None:
    event = decode(msgspec.msgpack.encode(saying(content=content)), "request")
    assert isinstance(event, RequestSubmitted)
    assert decode(encode(event), "request") == event
    assert submission_digest(event)


def test_an_error_quotes_no_more_of_a_client_than_the_log_can_take() -> None:
    body = msgspec.msgpack.encode(GOOD | {"params": {"x" * 1_000_000: 1}})
    with pytest.raises(MalformedEventError, match="unknown field") as refused:
        decode(body, "request")
    assert len(str(refused.value)) <= MAX_MESSAGE_CHARS
    assert len(Failure(code="c", message="é" * 1_000_000).message) == MAX_MESSAGE_CHARS


@pytest.mark.parametrize("field", ["model", "trace"])
def test_what_every_later_event_repeats_is_short(field: str) -> None:
    with pytest.raises(MalformedEventError, match=field):
        decode(msgspec.msgpack.encode(GOOD | {field: "x" * 10_000}), "request")


def test_a_cancel_has_a_short_reason() -> None:
    assert decode(b"{}", "control") == RequestCancel()
    with pytest.raises(MalformedEventError, match="reason"):
        decode(msgspec.msgpack.encode({"reason": "x" * 10_000}), "control")


def test_what_a_gateway_says_of_its_clients_stands_among_the_cancels() -> None:
    watched = RequestWatched(id="g.1", writer="g", request_id="r")

    assert decode(encode(watched), "control") == watched
    with pytest.raises(MalformedEventError):
        decode(encode(watched), "request")


def test_no_token_at_all_may_be_asked_for_with_an_echo_only() -> None:
    nothing = GOOD | {"params": {"max_tokens": 0}}
    with pytest.raises(MalformedEventError, match="max_tokens: expected an integer >= 1, found 0"):
        decode(msgspec.msgpack.encode(nothing), "request")
    event = decode(msgspec.msgpack.encode(GOOD | {"params": {"max_tokens": 0, "echo": True}}), "request")
    assert isinstance(event, RequestSubmitted)
    assert event.params.max_tokens == 0


def test_parameters_nobody_asked_for_are_not_written_down() -> None:
    assert msgspec.to_builtins(Params(max_tokens=3)) == {"max_tokens": 3}


@pytest.mark.parametrize(
    ("params", "digest"),
    [
        ({}, "dcd811da1027da5b588e06392e6aa2ca"),
        (
            {
                "max_tokens": 4, "seed": 7, "stop": ["\n", "é"], "temperature": 0.5, "top_p": 0.9, "top_k": 3,
                "ignore_eos": True, "choice": 2, "logprobs": 3, "echo": True,
            },
            "6f1658242345262d077bb7e67015f9cf",
        ),
        ({"temperature": 0.0}, "c774130a292356550c781e77f1182910"),
    ],
)  # fmt: skip
def test_a_submission_has_the_digest_it_always_had(params: dict[str, Any], digest: str) -> None:
    """Logs contain digests of versions with fewer parameters; new parameters must not change them."""
    asked = msgspec.convert(params, Params)

    assert (
        submission_digest(RequestSubmitted(model="demo", inputs=Inputs(text="hi", chat=False), params=asked))
        == digest
    )


def digest_with(**params: Any) -> str:
    event = decode(msgspec.msgpack.encode(GOOD | {"params": params}), "request")
    assert isinstance(event, RequestSubmitted)
    return submission_digest(event)


def test_biases_are_the_same_whatever_writes_them() -> None:
    one = digest_with(logit_bias={"5": 1, "30": -2.5})

    assert digest_with(logit_bias={30: -2.5, 5: 1.0}) == one
    as_json = decode(msgspec.json.encode(GOOD | {"params": {"logit_bias": {"30": -2.5, "5": 1}}}), "request")
    assert isinstance(as_json, RequestSubmitted)
    assert submission_digest(as_json) == one
    assert as_json.params.logit_bias == {"5": 1.0, "30": -2.5}
    assert decode(encode(as_json), "request") == as_json


@pytest.mark.parametrize(
    "guide",
    [
        {"json_schema": {"type": "object", "properties": {"b": True, "a": {"const": 1.5}}}},
        {"json_schema": True},
        {"json_schema": {}},
        {"json_object": True},
        {"regex": r"[a-z]{3}\d+"},
        {"grammar": 'start: "a"+'},
        {"choice": ["yes", "no"]},
    ],
)
def test_a_guide_comes_back_as_it_was_written(guide: dict[str, Any]) -> None:
    for packed in (msgspec.msgpack.encode, msgspec.json.encode):
        event = decode(packed(GOOD | {"params": {"guide": guide}}), "request")
        assert isinstance(event, RequestSubmitted)
        assert event.params.guide == msgspec.convert(guide, Guide)
        assert msgspec.json.encode(msgspec.to_builtins(event.params)["guide"]) == msgspec.json.encode(guide)
        assert decode(encode(event), "request") == event
    assert digest_with(guide=guide) != digest_with()


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        ({}, "expected one of json_schema, json_object, regex, grammar, choice; found none of them"),
        ({"json_object": False}, "found none of them"),
        ({"regex": "a", "choice": ["a"]}, r"found regex, choice - at `\$.params.guide`"),
        ({"json_schema": {}, "json_object": True}, "found json_schema, json_object"),
        ({"json_schema": "{}"}, r"params.guide.json_schema"),
        ({"json_schema": {"const": float("inf")}}, "json_schema: expected a JSON value"),
        ({"json_schema": {"a": nested(70)}}, "json_schema: nested deeper than 64 levels"),
        (
            {"json_schema": {"a": {1: 2}}},
            "json_schema: expected a JSON value with numbers of at most 64 bits, found a map",
        ),
        ({"regex": ""}, r"params.guide.regex"),
        ({"regex": "a" * 131_072}, "regex: expected at most 131072 bytes, found 1310"),
        ({"grammar": "é" * 70_000}, "grammar: expected at most 131072 bytes, found 140"),
        ({"choice": []}, r"params.guide.choice"),
        ({"choice": ["a", ""]}, r"params.guide.choice"),
        ({"choice": ["a" * 200] * 1000}, "choice: expected at most 131072 bytes"),
        ({"schema": {}}, "unknown field `schema`"),
    ],
)
def test_a_guide_is_one_thing_of_a_bounded_size(guide: dict[str, Any], message: str) -> None:
    with pytest.raises(MalformedEventError, match=message):
        decode(msgspec.msgpack.encode(GOOD | {"params": {"guide": guide}}), "request")


def test_a_guide_is_text_that_can_be_written() -> None:
    with pytest.raises(ValueError, match="regex: expected valid Unicode, found a lone surrogate"):
        Guide(regex="\ud800")


def test_a_penalty_of_nothing_is_none() -> None:
    assert digest_with(presence_penalty=0, frequency_penalty=0.0, logit_bias={}) == digest_with()
    assert digest_with(repetition_penalty=1.0) != digest_with()  # it may undo the checkpoint's


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {"x": 1}}, "logit_bias: expected token ids, found 'x'"),
        ({"logit_bias": {"-1": 1}}, "logit_bias: expected token ids, found '-1'"),
        ({"logit_bias": {-1: 1}}, "logit_bias: expected token ids, found '-1'"),
        ({"logit_bias": {"²": 1}}, "logit_bias: expected token ids"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias: expected token ids"),
        ({"logit_bias": {str(2**31): 1}}, "logit_bias: expected token ids"),
        ({"logit_bias": {"5": 100.5}}, "from -100 to 100, found 100.5 for token 5"),
        ({"logit_bias": {"5": float("nan")}}, "from -100 to 100, found nan for token 5"),
        ({"logit_bias": {"5": "much"}}, "from -100 to 100, found 'much' for token 5"),
        ({"logit_bias": {"5": True}}, "from -100 to 100, found True for token 5"),
        ({"logit_bias": {"5": None}}, "from -100 to 100, found None for token 5"),
        ({"logit_bias": {"5": 1, "05": 1}}, "expected each token once, found 5 twice"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "at most 1024 tokens, found 1025"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens: expected at most max_tokens, which is 4, found 5"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 1.01}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [[]]}, "bad_words"),
        ({"bad_words": [["a"]]}, "bad_words"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_how_to_choose_tokens_has_its_ranges(params: dict[str, Any], message: str) -> None:
    with pytest.raises(MalformedEventError, match=message):
        decode(msgspec.msgpack.encode(GOOD | {"params": params}), "request")


@pytest.mark.parametrize("kind", ["walk", "output", "conductor", "worker"])
def test_what_clients_read_has_no_integers_as_keys(kind: str) -> None:
    """MessagePack libraries of other languages, and Python's by default, refuse them."""
    found = msgspec.inspect.multi_type_info(EVENT_TYPES[kind])
    assert [path for one in found for path in _integer_keys(one, "")] == []


def _integer_keys(kind: msgspec.inspect.Type, path: str) -> list[str]:
    match kind:
        case msgspec.inspect.StructType():
            return [one for f in kind.fields for one in _integer_keys(f.type, f"{path}.{f.name}")]
        case msgspec.inspect.DictType(key_type=msgspec.inspect.IntType()):
            return [path]
        case msgspec.inspect.DictType():
            return _integer_keys(kind.value_type, f"{path}.*")
        case msgspec.inspect.ListType():
            return _integer_keys(kind.item_type, f"{path}[]")
        case msgspec.inspect.UnionType():
            return [one for part in kind.types for one in _integer_keys(part, path)]
        case _:
            return []
