"""The shared part of requests of texts: reading, names of texts, limits, refusals."""

from collections.abc import Callable

import msgspec
import pytest

from models.text_encoder import requests
from models.text_encoder.graph import TextEncoderOptions
from shared.errors import ClientError
from shared.events import Inputs, Media, Params

_IMAGE = Media(modality="image", digest="0" * 64)


@pytest.mark.parametrize(
    ("inputs", "texts", "names"),
    [
        (Inputs(texts=["a", [1, 2]]), ["a", [1, 2]], ["texts[0]", "texts[1]"]),
        (Inputs(text="a"), ["a"], ["text"]),
        (Inputs(text=""), [""], ["text"]),
        (Inputs(text="", files=[_IMAGE]), [], []),
        (Inputs(token_ids=[3]), [[3]], ["token_ids"]),
    ],
)
def test_each_text_has_the_name_of_its_field(
    inputs: Inputs, texts: list[str | list[int]], names: list[str]
) -> None:
    assert requests.texts_of(inputs) == (texts, names)


@pytest.mark.parametrize(("asked", "tokens"), [(None, None), (-1, None), (1, 1), (8, 8)])
def test_a_request_may_leave_the_length_to_the_model(asked: int | None, tokens: int | None) -> None:
    assert requests.truncated_to(Params(truncate_prompt_tokens=asked), 8) == tokens


def test_a_length_beyond_the_models_is_refused() -> None:
    with pytest.raises(ClientError, match="at most the model's 8 tokens, found 9"):
        requests.truncated_to(Params(truncate_prompt_tokens=9), 8)


def test_options_are_read_from_the_arguments() -> None:
    request = requests.TextsRequest(inputs=Inputs(text="a"), params=Params(options={"prompt": "p"}))

    found, options = requests.read(msgspec.to_builtins(request), TextEncoderOptions)

    assert found == request
    assert options == TextEncoderOptions(prompt="p")


def test_malformed_options_are_an_error_of_the_client() -> None:
    request = requests.TextsRequest(inputs=Inputs(text="a"), params=Params(options={"prompt": 1}))

    with pytest.raises(ClientError, match=r"the request is malformed: Expected `str \| null`"):
        requests.read(msgspec.to_builtins(request), TextEncoderOptions)


@pytest.mark.parametrize(
    ("refuse", "message"),
    [
        (
            lambda: requests.refuse_chats(Inputs(messages=[]), does="scores texts", expected="texts"),
            "this model scores texts: expected texts, found a chat",
        ),
        (lambda: requests.refuse_files(Inputs(text="a", files=[_IMAGE])), "this model reads text only"),
        (
            lambda: requests.refuse_queries(Inputs(texts=["a"], queries=["b"]), Params(), does="reads"),
            "this model reads and compares none",
        ),
        (
            lambda: requests.refuse_outputs(Inputs(text="a", output_modalities=["x"]), {"y"}, makes="ys"),
            "this model makes ys; asked for",
        ),
        (lambda: requests.refuse_generation(Params(echo=True), result="a y is"), "a y is no answer in text"),
    ],
)
def test_what_a_family_cannot_do_is_refused_in_its_words(refuse: Callable[[], None], message: str) -> None:
    with pytest.raises(ClientError, match=message):
        refuse()


def test_what_a_family_can_do_passes() -> None:
    inputs = Inputs(texts=["a"], output_modalities=["y"])

    requests.refuse_chats(inputs, does="scores texts", expected="texts")
    requests.refuse_files(inputs)
    requests.refuse_queries(inputs, Params(), does="scores texts")
    requests.refuse_outputs(inputs, {"y"}, makes="ys")
    requests.refuse_generation(Params(), result="a y is")
