"""Lines of a batch's file: splitting, and what makes one broken."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from gateway.batches.lines import BatchLine, BrokenLineError, lines_of, parse_line

CHAT = "/v1/chat/completions"
BODY = {"model": "demo", "messages": []}


def line(**fields: Any) -> bytes:
    return json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": BODY} | fields).encode()


async def split(data: bytes, size: int, max_bytes: int = 100) -> list[tuple[int, bytes | None]]:
    async def chunks() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(data), size):
            yield data[start : start + size]

    return [one async for one in lines_of(chunks(), max_bytes)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_lines_are_split_wherever_the_chunks_end(size: int) -> None:
    data = b"\xef\xbb\xbf  first \r\n\n  \nsecond\n\xff\xfe\nlast"

    assert await split(data, size) == [(1, b"first"), (2, b"second"), (3, b"\xff\xfe"), (4, b"last")]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_line_beyond_the_limit_is_not_held(size: int) -> None:
    data = b"a" * 10 + b"\n" + b"b" * 11 + b"\n" + b"c\n" + b"d" * 500

    assert await split(data, size, max_bytes=10) == [(1, b"a" * 10), (2, None), (3, b"c"), (4, None)]


async def test_a_file_of_blank_lines_has_none() -> None:
    assert await split(b"\n \r\n\t\n", 2) == []


def test_the_body_of_a_line_stays_as_the_client_wrote_it() -> None:
    data = b'{"custom_id":"a","method":"post","url":"/v1/chat/completions","body":{ "x" : 1e400 , "y":[ ]}}'

    with pytest.raises(BrokenLineError):
        parse_line(1, data, CHAT, set(), 100)
    data = data.replace(b"1e400", b"1.50")
    assert parse_line(3, data, CHAT, set(), 100) == BatchLine(3, "a", b'{ "x" : 1.50 , "y":[ ]}')


@pytest.mark.parametrize(
    ("data", "message", "custom_id"),
    [
        (None, "line 7: expected at most 100 bytes (gateway.max_body_bytes)", None),
        (b"{", "line 7: it is not JSON: Input data was truncated", None),
        (b'{"custom_id": "\xff"}', "line 7: it is not JSON: ", None),
        (b"[]", "line 7: expected a JSON object, found an empty array", None),
        (line(custom_id=""), "line 7: custom_id: expected ", None),
        (line(custom_id=3), "line 7: custom_id: expected a string", None),
        (line(custom_id="x" * 513), "line 7: custom_id: expected ", "x" * 513),
        (b'{"custom_id": "a"}', "line 7: method: expected a string, found nothing", "a"),
        (line(body=[]), "line 7: body: expected an object", "a"),
        (line(metod="POST"), "line 7: metod: unknown name", "a"),
        (line(method="GET"), "line 7: method: expected 'POST', found 'GET'", "a"),
        (line(url="/v1/embeddings"), "line 7: url: expected the endpoint of the batch", "a"),
        (line(body=BODY | {"stream": True}), "line 7: body.stream: expected none in a batch", "a"),
        (line(body=BODY | {"request_id": "r"}), "line 7: body.request_id: expected none in a batch", "a"),
        (line(body=BODY | {"background": True}), "line 7: body.background: expected none in a batch", "a"),
    ],
)
def test_a_broken_line_says_what_was_expected(data: bytes | None, message: str, custom_id: str) -> None:
    with pytest.raises(BrokenLineError) as caught:
        parse_line(7, data, CHAT, set(), 100)

    assert caught.value.message.startswith(message), caught.value.message
    assert caught.value.custom_id == custom_id


def test_stream_may_be_false() -> None:
    assert parse_line(1, line(body=BODY | {"stream": False}), CHAT, set(), 100).custom_id == "a"


def test_a_custom_id_is_that_of_one_line_also_if_the_first_is_broken() -> None:
    seen: set[str] = set()
    parse_line(1, line(), CHAT, seen, 100)
    with pytest.raises(BrokenLineError):
        parse_line(2, line(custom_id="b", url="/x"), CHAT, seen, 100)

    for custom_id in ("a", "b"):
        with pytest.raises(BrokenLineError, match="is that of an earlier line") as caught:
            parse_line(3, line(custom_id=custom_id), CHAT, seen, 100)
        assert (caught.value.code, caught.value.custom_id) == ("duplicate_custom_id", custom_id)
