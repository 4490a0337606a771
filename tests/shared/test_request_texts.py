"""Several texts in a request: their bounds, and the check before admission."""

from typing import Any

import msgspec
import pytest

from shared.errors import ClientError
from shared.events import MAX_TEXTS, Inputs, Media, Params
from shared.request_texts import check_texts

CAT = Media(modality="image", digest="ab" * 32, size=3)


@pytest.mark.parametrize(
    "inputs",
    [
        Inputs(text="hi"),
        Inputs(texts=["a", [1, 2]]),
        Inputs(texts=[], files=[CAT]),
        Inputs(texts=["a", "b"], queries=["q"]),
        Inputs(texts=["a"], files=[CAT], queries=["q", "r"]),
    ],
)
def test_texts_with_a_query_for_all_or_for_each_are_taken(inputs: Inputs) -> None:
    check_texts(inputs, Params(truncate_prompt_tokens=8), takes_texts=True, truncates=True)


@pytest.mark.parametrize(
    ("inputs", "takes_texts", "code", "found"),
    [
        (Inputs(texts=["a"]), False, "texts_not_supported", "takes one text"),
        (Inputs(texts=[]), True, "invalid_request", "at least one text or file"),
        (Inputs(texts=["a", "b", "c"], queries=["q", "r"]), True, "invalid_request", "each of the 3"),
        (Inputs(texts=["a"], queries=["q", "r"]), True, "invalid_request", "none or one, found 2"),
    ],
)
def test_other_texts_are_refused(inputs: Inputs, takes_texts: bool, code: str, found: str) -> None:
    with pytest.raises(ClientError, match=found) as refused:
        check_texts(inputs, Params(), takes_texts=takes_texts, truncates=True)
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"texts": ["a"], "text": "a"}, "expected one of messages, text, token_ids, texts"),
        ({"text": "a", "queries": ["q"]}, "queries: expected none without texts"),
        ({"texts": [[]]}, r"\$.texts\[0\]"),
        ({"texts": [[-1]]}, r"\$.texts\[0\]\[0\]"),
        ({"texts": ["a"] * (MAX_TEXTS + 1)}, "10000"),
        ({"texts": ["a"], "tools": [{"type": "function", "function": {"name": "f"}}]}, "raw prompt"),
    ],
)
def test_an_event_with_malformed_texts_cannot_be_read(given: dict[str, Any], found: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=found):
        msgspec.convert(given, Inputs)


@pytest.mark.parametrize(
    "params", [{"truncate_prompt_tokens": 4}, {"truncation_side": "left"}, {"max_tokens_per_doc": 4}]
)
def test_a_model_that_takes_one_text_does_not_truncate_it(params: dict[str, Any]) -> None:
    [name] = params
    with pytest.raises(ClientError, match=f"{name}: this model does not truncate") as refused:
        check_texts(Inputs(text="hi"), Params(**params), takes_texts=False, truncates=False)
    assert refused.value.code == "not_supported"


def test_documents_are_truncated_for_a_query_only() -> None:
    params = Params(max_tokens_per_doc=4)
    check_texts(Inputs(texts=["a"], queries=["q"]), params, takes_texts=True, truncates=True)
    with pytest.raises(ClientError, match="max_tokens_per_doc"):
        check_texts(Inputs(texts=["a"]), params, takes_texts=True, truncates=True)


def test_a_text_is_not_truncated_to_nothing() -> None:
    with pytest.raises(msgspec.ValidationError, match="truncate_prompt_tokens: expected"):
        msgspec.convert({"truncate_prompt_tokens": 0}, Params)
    assert msgspec.convert({"truncate_prompt_tokens": -1}, Params).truncate_prompt_tokens == -1
