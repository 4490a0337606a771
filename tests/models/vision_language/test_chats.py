"""Chats with media: the forms that templates take, and the order in which media are placed."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from models.text.chat_template import ChatTemplate, ChatTemplateError
from models.vision_language.chats import MediaChatPrompts, placed, with_messages
from shared.errors import ClientError
from shared.events import Inputs, Media, Params

_PARTS = (
    "{% for m in messages %}{% for part in m['content'] %}"
    "{{ part['text'] if part['type'] == 'text' else '<i>' }}{% endfor %}|{% endfor %}"
)
_STRINGS = "{% for m in messages %}{{ m['content'] }}|{% endfor %}"
_BOTH = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{{ part['text'] if part['type'] == 'text' else '<i>' }}{% endfor %}"
    "{% endif %}|{% endfor %}"
)


def inputs(*messages: dict[str, Any], files: tuple[str, ...] = ("image", "image"), **more: Any) -> Inputs:
    media = [Media(modality=kind, digest=f"{number:064x}") for number, kind in enumerate(files)]
    return Inputs(files=media, messages=[*messages] or None, **more)


def said(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": [*content]}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def image(number: Any) -> dict[str, Any]:
    return {"type": "image", "file": number}


@pytest.mark.parametrize("source", [_PARTS, _BOTH])
def test_templates_that_take_parts_get_the_place_of_each_medium(source: str) -> None:
    chats = MediaChatPrompts(ChatTemplate(source, {}, origin="test"), None)

    found = chats.text_of(inputs(said(text("a"), image(0), text("b"), image(1)), said(text("c"))))

    assert found == "a<i>b<i>|c|"


@pytest.mark.parametrize("source", [_PARTS, _STRINGS, _BOTH])
@pytest.mark.parametrize("content", ["hello", [text("hel"), text("lo")]])
def test_every_template_takes_texts_in_both_forms(source: str, content: Any) -> None:
    chats = MediaChatPrompts(ChatTemplate(source, {}, origin="test"), None)

    assert chats.text_of(inputs({"role": "user", "content": content}, files=())) == "hello|"


def test_a_template_for_strings_refuses_media() -> None:
    chats = MediaChatPrompts(ChatTemplate(_STRINGS, {}, origin="test"), None)

    with pytest.raises(ChatTemplateError, match=r"messages\[0\]\.content: the chat template .* text only"):
        chats.text_of(inputs(said(image(0))))


def test_media_are_placed_in_the_order_of_the_messages() -> None:
    chat = inputs(
        said(image(2), text("a"), image(0)),
        said(text("b")),
        said(image(1)),
        files=("image", "image", "image"),
    )

    assert placed(chat) == [("image", 2), ("image", 0), ("image", 1)]


def test_a_medium_can_be_placed_twice() -> None:
    assert placed(inputs(said(image(0)), said(image(0)), files=("image",))) == [("image", 0), ("image", 0)]


def test_a_text_with_media_is_one_message_with_the_media_first() -> None:
    found = with_messages(inputs(text="What?"))

    assert found.messages == [said(image(0), image(1), text("What?"))]
    assert with_messages(inputs(text="", files=("image",))).messages == [said(image(0))]
    raw = inputs(text="<i> What?", chat=False)
    assert with_messages(raw) is raw


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        (image(2), "of one of 2 files"),
        (image(-1), "of one of 2 files"),
        (image(True), "of one of 2 files"),
        (image("0"), "of one of 2 files"),
        ({"type": "image"}, "of one of 2 files"),
        ({"type": "video", "file": 0}, "expected 'image' in 'type'"),
        ({"type": "hologram", "file": 0}, "expected 'image' in 'type'"),
    ],
)
def test_parts_that_place_no_medium_are_refused_by_name(part: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ClientError, match=rf"messages\[1\]\.content\[1\]: .*{complaint}"):
        placed(inputs(said(text("a")), said(image(0), part)))


def test_files_that_no_message_places_are_refused_by_name() -> None:
    with pytest.raises(ClientError, match=r"files\[1\]: expected a part of a message that places it"):
        placed(inputs(said(image(0))))


def test_tools_and_their_template_are_those_of_any_chat(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(_BOTH)
    chats = MediaChatPrompts.read(tmp_path, {})
    call = {"type": "function", "function": {"name": "look"}}

    with pytest.raises(ClientError, match="takes no tools"):
        chats.with_tools(msgspec.convert({"messages": [said(image(0))], "tools": [call]}, Inputs), Params())


def test_the_template_of_an_older_processor_has_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(msgspec.json.encode({"chat_template": _PARTS}).decode())
    (tmp_path / "tokenizer_config.json").write_text(msgspec.json.encode({"chat_template": "no"}).decode())

    assert MediaChatPrompts.read(tmp_path, {}).text_of(inputs(said(image(0)))) == "<i>|"
