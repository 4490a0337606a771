"""The media that a request names are checked before it is admitted."""

from typing import Any

import pytest

from shared.errors import ClientError
from shared.events import Inputs, Media, RequestSubmitted, decode
from shared.media.request_check import check_media

CAT = Media(modality="image", digest="a" * 64, size=3, name="cat.png")
SONG = Media(modality="audio", digest="b" * 64, size=3)


def placed(*parts: dict[str, Any]) -> Inputs:
    content = [*parts, {"type": "text", "text": "What is it?"}]
    return Inputs(messages=[{"role": "user", "content": content}], files=[CAT, SONG])


def test_files_named_by_digest_pass() -> None:
    check_media(
        placed({"type": "image", "file": 0}, {"type": "audio", "file": 1}), ("image", "audio", "text")
    )
    check_media(Inputs(text="hi", files=[CAT]), ("text", "image"))


@pytest.mark.parametrize(
    ("medium", "code", "message"),
    [
        (
            {"data": b"x"},
            "inline_media",
            r"files\[0\]: expected the digest of .*, found bytes: .*docs/media.md",
        ),
        ({"ref": "s3://x"}, "inline_media", "found a reference"),
        ({}, "inline_media", "found none"),
        ({"digest": "a" * 64}, "invalid_request", "expected the size of the medium in bytes, found 0"),
        (
            {"modality": "smell", "digest": "a" * 64, "size": 1, "name": "cat.png"},
            "invalid_request",
            r"files\[0\] \('cat.png'\): expected a modality of image, audio, video, tensor, found 'smell'",
        ),
        (
            {"modality": "video", "digest": "a" * 64, "size": 1},
            "unsupported_modality",
            r"files\[0\]: this model takes text, image, found video",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(
    medium: dict[str, Any], code: str, message: str
) -> None:
    inputs = Inputs(text="hi", files=[Media(**{"modality": "image"} | medium)])
    with pytest.raises(ClientError, match=message) as told:
        check_media(inputs, ("text", "image"))
    assert told.value.code == code


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image", "file": 2}, r"messages\[0\].content\[0\].file: .* the request's 2 files, found 2"),
        ({"type": "image", "file": -1}, "found -1"),
        ({"type": "image", "file": True}, "found True"),
        ({"type": "image", "file": "0"}, "found '0'"),
        (
            {"type": "video", "file": 0},
            r"content\[0\].type: expected 'image', the modality of files\[0\] \('cat.png'\), found 'video'",
        ),
    ],
)
def test_a_place_without_a_file_is_refused_by_name(part: dict[str, Any], message: str) -> None:
    with pytest.raises(ClientError, match=message):
        check_media(placed(part), ("text", "image", "audio"))


def test_a_request_of_an_earlier_version_still_decodes() -> None:
    """Its replay has to reach what was decided then: the admission is recorded."""
    old = b'{"model": "m", "inputs": {"text": "hi", "files": [{"modality": "image", "data": "eA=="}]}}'
    event = decode(old, "request")

    assert isinstance(event, RequestSubmitted)
    assert event.inputs.files == [Media(modality="image", data=b"x")]
    assert event.inputs.text == "hi"
