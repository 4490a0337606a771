import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.bundle import json_form
from dalsegno.bundle.json_form import UnreadableFormError
from shared.events import Inputs, RequestSubmitted, encode
from tests.dalsegno.histories import answered

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=20)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=20)
    ),
)


def there_and_back(data: bytes) -> bytes:
    return json_form.data_of(json.loads(json.dumps(json_form.form_of(data))))


@pytest.mark.slow
@given(VALUES)
def test_every_value_comes_back_byte_by_byte(value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    assert there_and_back(data) == data


@given(st.binary())
def test_all_bytes_come_back(data: bytes) -> None:
    assert there_and_back(data) == data


def test_events_are_shown_as_events() -> None:
    for record in answered():
        assert set(json_form.form_of(record.data)) <= {"event", "wide"}


def test_a_header_that_is_longer_than_it_had_to_be_comes_back_so() -> None:
    data = encode(RequestSubmitted(model="demo", inputs=Inputs(text="What?")))
    form = json_form.form_of(data)
    assert data[0] == 0xDE
    assert form["event"]["inputs"]["text"] == "What?"
    assert form["wide"][0] == 0
    assert there_and_back(data) == data


def test_what_is_json_already_stays_as_it_was_written() -> None:
    data = b'{"model": "demo",\n  "inputs": {"text": "What?"}}'
    assert json_form.form_of(data) == {"text": data.decode()}


def test_what_cannot_be_said_otherwise_is_base64() -> None:
    for data in (b"\xff\xfe", msgspec.msgpack.encode(math.nan), b"\xd4\x01x", b"\xd9\x01\xff"):
        assert set(json_form.form_of(data)) == {"bytes"}
        assert there_and_back(data) == data


def test_a_map_of_bytes_or_of_numbers_is_shown_as_one() -> None:
    data = msgspec.msgpack.encode({"lives": {0: 17}, "history": b"\1\2", "$map": 1})
    assert json_form.form_of(data)["event"] == {
        "$map": [
            ["lives", {"$map": [[0, 17]]}],
            ["history", {"$bytes": "AQI="}],
            ["$map", 1],
        ]
    }
    assert there_and_back(data) == data


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"event": {"$bytes": 1}},
        {"event": {"$bytes": "?"}},
        {"event": {"$map": [[1]]}},
        {"event": {"$map": [[[], 1]]}},
        {"event": 2**64},
        {"event": {}, "wide": ["x"]},
        {"event": {}, "wide": 1},
        {"text": "\ud800"},
        {"bytes": "?"},
        {"bytes": 1},
    ],
)
def test_what_is_no_form_is_refused(form: dict[str, Any]) -> None:
    with pytest.raises(UnreadableFormError):
        json_form.data_of(form)
