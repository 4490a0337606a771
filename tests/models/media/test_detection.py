"""The format of a file follows from its first bytes."""

import pytest

from models.media.detection import HEAD_BYTES, format_of
from tests.models.media import samples


@pytest.mark.parametrize("kind", samples.IMAGES)
def test_images_are_detected(kind: str) -> None:
    found = format_of(samples.image(kind)[:HEAD_BYTES])

    assert found is not None
    assert (found.modality, found.pillow) == ("image", kind)


@pytest.mark.parametrize(
    ("container", "content_type"),
    [
        ("mp4", "video/mp4"),
        ("mov", "video/quicktime"),
        ("webm", "video/webm"),
        ("matroska", "video/x-matroska"),
    ],
)
def test_videos_are_detected(container: str, content_type: str) -> None:
    found = format_of(samples.video(container)[:HEAD_BYTES])

    assert found is not None
    assert found.content_type == content_type


@pytest.mark.parametrize(
    ("container", "content_type"),
    [
        ("wav", "audio/wav"),
        ("flac", "audio/flac"),
        ("mp3", "audio/mpeg"),
        ("ogg", "audio/ogg"),
        ("ipod", "audio/mp4"),
    ],
)
def test_audio_is_detected(container: str, content_type: str) -> None:
    found = format_of(samples.audio(container)[:HEAD_BYTES])

    assert found is not None
    assert (found.modality, found.content_type) == ("audio", content_type)


@pytest.mark.parametrize(
    "head", [b"", b"<html>", b"%PDF-1.7", b"\xff\xff\xff\xff", b"RIFF____AVI ", b"{}", b"\0" * 64]
)
def test_other_bytes_are_no_format(head: bytes) -> None:
    assert format_of(head) is None


def test_mpeg_audio_without_tags_and_adts_are_told_apart() -> None:
    mp3, aac = format_of(b"\xff\xfb\x90\x00" + b"\0" * 60), format_of(b"\xff\xf1\x50\x80" + b"\0" * 60)

    assert mp3 is not None
    assert aac is not None
    assert (mp3.demuxer, aac.demuxer) == ("mp3", "aac")
