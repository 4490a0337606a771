"""Captions as players read them."""

import io
from typing import Any

import av

from gateway.transcriptions import captions

SEGMENTS: list[dict[str, Any]] = [
    {"start": 0.0, "end": 2.5, "text": " Good morning,\n\nDr. Watson."},
    {"start": 2.5, "end": 3.0, "text": "   "},
    {"start": 3661.2345, "end": 3662.0, "text": "A <b> & a -->"},
]


def test_a_subrip_file_numbers_the_segments_that_say_something() -> None:
    assert captions.srt(SEGMENTS) == (
        "1\n00:00:00,000 --> 00:00:02,500\nGood morning, Dr. Watson.\n\n"
        "2\n01:01:01,234 --> 01:01:02,000\nA <b> & a ->\n\n"
    )


def test_a_webvtt_file_has_no_markup() -> None:
    assert captions.vtt(SEGMENTS) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nGood morning, Dr. Watson.\n\n"
        "01:01:01.234 --> 01:01:02.000\nA &lt;b&gt; &amp; a -&gt;\n\n"
    )


def test_silence_has_no_captions() -> None:
    assert captions.srt([]) == ""
    assert captions.vtt([]) == "WEBVTT\n\n"


def test_ffmpeg_reads_both() -> None:
    for form, text in (("srt", captions.srt(SEGMENTS)), ("webvtt", captions.vtt(SEGMENTS))):
        with av.open(io.BytesIO(text.encode()), "r", format=form) as file:
            packets = [packet for packet in file.demux(file.streams.subtitles[0]) if packet.size]
        assert [float((one.pts or 0) * one.time_base) for one in packets] == [0.0, 3661.234], form
