import hashlib
from typing import Any

import pytest

from dalsegno.client.request import client_request
from shared.errors import ClientError
from shared.events import Media
from tests.hostile import NO_TOKENS


def test_a_question_is_the_inputs_and_parameters_of_the_log() -> None:
    asked = client_request("hi", None, "mine", {"stop": "x", "max_tokens": 3, "logprobs": 0, "chat": False})

    assert (asked.request_id, asked.model) == ("mine", None)
    assert (asked.inputs.text, asked.inputs.chat) == ("hi", False)
    assert asked.model_kwargs == {"stop": ["x"], "max_tokens": 3, "logprobs": 0}


def test_how_tokens_are_chosen_is_said_as_anywhere() -> None:
    how = {"min_p": 0.1, "logit_bias": {5: 1, "3": -2}, "bad_words": ["no", (4, 5)], "stop_token_ids": (8,)}

    assert client_request("hi", None, None, how).model_kwargs == {
        "min_p": 0.1, "logit_bias": {"3": -2, "5": 1}, "bad_words": ["no", [4, 5]], "stop_token_ids": [8],
    }  # fmt: skip


def test_what_the_answer_has_to_be_is_said_as_anywhere() -> None:
    guide = {"json_schema": {"type": "object", "properties": {"b": {}, "a": {}}}}

    assert client_request("hi", None, None, {"guide": guide}).model_kwargs == {"guide": guide}
    with pytest.raises(ClientError, match=r"guide: expected one of .*; found regex, choice"):
        client_request("hi", None, None, {"guide": {"regex": "a", "choice": ["a"]}})


def test_a_file_is_named_and_its_modality_comes_in() -> None:
    asked = client_request(
        "hi", None, None, {"images": ("a.png", b"1"), "audio": [("b.mp3", b"2"), ("c.wav", b"3")]}
    )

    assert asked.inputs.input_modalities == ["image", "audio", "text"]
    assert [(file.modality, file.name, file.data) for file in asked.files] == [
        ("image", "a.png", b"1"), ("audio", "b.mp3", b"2"), ("audio", "c.wav", b"3"),
    ]  # fmt: skip


def test_the_event_of_a_request_has_digests_of_its_media_and_no_bytes() -> None:
    [medium] = client_request("hi", None, None, {"images": ("a.png", b"pixels")}).inputs.files

    assert medium == Media(
        modality="image",
        digest=hashlib.sha256(b"pixels").hexdigest(),
        size=6,
        content_type="image/png",
        name="a.png",
    )


def test_an_output_modality_may_be_one_name() -> None:
    assert client_request("hi", None, None, {"output_modalities": "audio"}).inputs.output_modalities == [
        "audio"
    ]


@pytest.mark.parametrize(
    ("text", "how", "param", "hint"),
    [
        (None, {}, None, "found none of them"),
        ("hi", {"token_ids": [1]}, None, "found text and token_ids"),
        ("hi", {"temperature": -1}, "temperature", "expected a number >= 0, found -1"),
        ("hi", {"seed": "many"}, "seed", "expected an integer, found 'many'"),
        (7, {}, "text", "expected a string, found 7"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_it_is_sent(
    text: Any, how: dict[str, Any], param: str | None, hint: str
) -> None:
    with pytest.raises(ClientError) as caught:
        client_request(text, None, None, how)

    assert hint in caught.value.message
    assert caught.value.param == param


@pytest.mark.parametrize("request_id", NO_TOKENS.values(), ids=NO_TOKENS)
def test_an_id_that_cannot_be_one_is_refused(request_id: str) -> None:
    with pytest.raises(ClientError) as caught:
        client_request("hi", None, request_id, {})

    assert caught.value.code == "invalid_request_id"


def test_a_name_that_is_unknown_says_the_nearest() -> None:
    with pytest.raises(TypeError, match="unknown argument 'temprature': did you mean 'temperature'"):
        client_request("hi", None, None, {"temprature": 1})


def test_files_come_before_the_last_question_unless_messages_place_them() -> None:
    png = b"\x89PNG\r\n\x1a\n"
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "?"},
    ]
    placed = [{"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image", "file": 0}]}]

    added = client_request(None, chat, "r1", {"images": png}).inputs
    kept = client_request(None, placed, "r1", {"images": png}).inputs

    assert added.messages is not None
    assert added.messages[2]["content"] == [{"type": "image", "file": 0}, {"type": "text", "text": "?"}]
    assert added.messages[:2] == chat[:2]
    assert kept.messages == placed
    assert added.files[0].content_type == "image/png"


def test_a_file_alone_is_a_request() -> None:
    inputs = client_request(None, None, "r1", {"video": ("a.mp4", b"\0\0\0\x18ftypisom")}).inputs

    assert (inputs.text, inputs.files[0].content_type) == ("", "video/mp4")
    assert inputs.input_modalities == ["video"]


def test_options_of_the_family_are_parameters() -> None:
    assert client_request("x", None, "r1", {"options": {"steps": 4}}).params.options == {"steps": 4}
