"""Results of lines, and of segments of them."""

import json

from gateway.batches.results import EXPIRED, LineResult, SegmentResults, segment_of


def answered(number: int, status: int = 200, body: bytes = b'{"a":\n 1}') -> LineResult:
    return LineResult(
        number=number, custom_id=f"c{number}", request_id=f"b-{number}", status=status, body=body
    )


def test_a_response_is_in_one_line_whatever_its_status() -> None:
    for status, is_error in ((200, False), (400, True), (500, True)):
        result = answered(1, status)

        assert result.is_error is is_error
        assert b"\n" not in result.encoded()
        assert json.loads(result.encoded()) == {
            "id": "batch_req_b-1",
            "custom_id": "c1",
            "response": {"status_code": status, "request_id": "b-1", "body": {"a": 1}},
            "error": None,
        }


def test_a_line_without_a_response_has_an_error() -> None:
    result = LineResult(number=1, custom_id=None, request_id="b-1", code=EXPIRED, message="too late")

    assert result.is_error
    assert json.loads(result.encoded()) == {
        "id": "batch_req_b-1",
        "custom_id": None,
        "response": None,
        "error": {"code": "batch_expired", "message": "too late"},
    }


async def test_a_segment_is_read_in_the_order_of_its_lines() -> None:
    segment = SegmentResults(0, 4)
    for result in (
        answered(3),
        answered(1),
        answered(4, 404),
        LineResult(number=2, custom_id="c2", request_id="b-2", code=EXPIRED, message="m"),
    ):
        assert not segment.is_complete
        segment.add(result)
    parts = [
        [json.loads(one)["custom_id"] async for one in segment.part(is_error=is_error)]
        for is_error in (False, True)
    ]
    segment.close()

    assert segment.is_complete
    assert parts == [["c1", "c3"], ["c2", "c4"]]
    assert (segment.completed, segment.failed, segment.expired) == (2, 2, 1)


def test_lines_are_counted_from_one_and_segments_from_zero() -> None:
    assert [segment_of(line) for line in (1, 500, 501, 1000, 1001)] == [0, 0, 1, 1, 2]
