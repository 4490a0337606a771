"""JetStream's JSON, as recorded from a server."""

import msgspec
import pytest

from shared.log.nats.api import MessageReply, PubAck, StreamInfo, parse_time_ns
from shared.log.port import LogState, StoredRecord


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01T00:00:01.5Z", 1_500_000_000),
        ("2026-11-20T09:16:47.123456789Z", 1_795_166_207_123_456_789),
        ("2026-11-20T10:16:47.12345678+01:00", 1_795_166_207_123_456_780),
        ("2026-11-20T01:16:47-08:00", 1_795_166_207_000_000_000),
    ],
)
def test_times_keep_every_digit(text: str, nanoseconds: int) -> None:
    assert parse_time_ns(text) == nanoseconds


def test_an_ack_is_a_sequence_or_a_reason() -> None:
    decode = msgspec.json.Decoder(PubAck).decode
    assert decode(b'{"stream":"DS_LOG", "seq":7}').seq == 7
    refused = decode(
        b'{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 3"},'
        b'"stream":"DS_LOG","seq":0}'
    )
    assert refused.error is not None
    assert (refused.error.err_code, refused.error.description) == (10071, "wrong last sequence: 3")


def test_a_stream_info_is_a_state() -> None:
    info = msgspec.json.decode(
        b'{"type":"io.nats.jetstream.api.v1.stream_info_response","config":{"name":"DS_LOG"},'
        b'"created":"1970-01-01T00:00:02Z","state":{"messages":3,"bytes":90,"first_seq":5,"first_ts":"1970-01-01T00:00:03Z",'
        b'"last_seq":7,"consumer_count":0},"ts":"2026-11-20T09:16:47Z"}',
        type=StreamInfo,
    )
    assert info.log_state() == LogState(
        first_seq=5,
        last_seq=7,
        created_ns=2_000_000_000,
        messages=3,
        bytes=90,
        first_ns=3_000_000_000,
    )


def test_a_message_is_a_record() -> None:
    reply = msgspec.json.decode(
        b'{"message":{"subject":"ds.walk.r","seq":4,"data":"AP8=","time":"1970-01-01T00:00:00.000000009Z"}}',
        type=MessageReply,
    )
    assert reply.record() == StoredRecord(4, "ds.walk.r", b"\x00\xff", 9)
