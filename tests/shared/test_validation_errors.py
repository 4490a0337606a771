from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from shared.validation_errors import described, validation_problem


class Part(msgspec.Struct):
    text: Annotated[str, Meta(min_length=1, max_length=4)]


class Whole(msgspec.Struct, forbid_unknown_fields=True):
    count: Annotated[int, Meta(ge=1, le=9)] | None = None
    heat: Annotated[float, Meta(gt=0, le=2)] = 1
    side: Annotated[int, Meta(ge=16, le=200, multiple_of=16)] = 16
    name: Annotated[str, Meta(pattern="^[a-z]+$")] = "x"
    kind: Literal["auto", "none"] = "auto"
    parts: Annotated[list[Part], Meta(min_length=1, max_length=2)] = msgspec.field(
        default_factory=lambda: [Part("x")]
    )
    either: str | list[str] | None = None
    on: bool = False
    map: dict[str, int] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.count == 7:
            raise ValueError("expected a count other than 7; found 7")
        if self.count == 8:
            raise ValueError("count: expected an odd number, found 8")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"count": 0}, "count: expected an integer >= 1, found 0"),
        ({"count": 10}, "count: expected an integer <= 9, found 10"),
        ({"count": 2**80}, "count: expected an integer <= 9, found an integer beyond 64 bits"),
        ({"count": "1"}, "count: expected an integer, found '1'"),
        ({"count": True}, "count: expected an integer, found true"),
        ({"count": 1.5}, "count: expected an integer, found 1.5"),
        ({"count": 7}, "expected a count other than 7; found 7"),
        ({"count": 8}, "count: expected an odd number, found 8"),
        ({"heat": 0}, "heat: expected a number > 0, found 0"),
        ({"side": 100}, "side: expected an integer that is a multiple of 16 (the nearest is 96), found 100"),
        ({"side": 8}, "side: expected an integer >= 16, found 8"),
        ({"side": 199}, "side: expected an integer that is a multiple of 16 (the nearest is 192), found 199"),
        ({"heat": 10**400}, "heat: expected a number <= 2, found an integer beyond 64 bits"),
        ({"heat": None}, "heat: expected a number, found null"),
        ({"name": "A"}, "name: expected a string that matches ^[a-z]+$, found 'A'"),
        ({"kind": "som"}, "kind: expected one of auto, none, found 'som'"),
        ({"kind": 5}, "kind: expected one of auto, none, found 5"),
        ({"parts": []}, "parts: expected an array of at least 1 item, found an empty array"),
        ({"parts": [{"text": "a"}] * 3},
         "parts: expected an array of at most 2 items, found an array of 3 items"),
        ({"parts": {}}, "parts: expected an array, found an object"),
        ({"parts": [3]}, "parts[0]: expected an object, found 3"),
        ({"parts": [{}]}, "parts[0].text: expected a string, found nothing"),
        ({"parts": [{"text": ""}]},
         "parts[0].text: expected a string of at least 1 character, found an empty string"),
        ({"parts": [{"text": "x" * 99}]},
         "parts[0].text: expected a string of at most 4 characters, found a string of 99 characters"),
        ({"either": 3}, "either: expected a string or an array, found 3"),
        ({"either": ["x", 3]}, "either[1]: expected a string, found 3"),
        ({"on": "yes"}, "on: expected true or false, found 'yes'"),
        ({"new": 1}, "new: unknown name"),
        ([], "expected an object, found an empty array"),
    ],
)  # fmt: skip
def test_a_misfit_says_where_it_is_and_what_was_expected_and_found(value: Any, message: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(value, Whole)

    assert validation_problem(caught.value, value, Whole).message == message


def test_only_what_is_not_there_is_missing() -> None:
    for value, is_missing in (({"parts": [{}]}, True), ({"parts": [{"text": None}]}, False)):
        with pytest.raises(msgspec.ValidationError) as caught:
            msgspec.convert(value, Whole)
        assert validation_problem(caught.value, value, Whole).is_missing is is_missing


def test_a_rule_over_several_fields_names_the_field_it_is_of() -> None:
    for value, place in (({"count": 7}, ""), ({"count": 8}, "count")):
        with pytest.raises(msgspec.ValidationError) as caught:
            msgspec.convert(value, Whole)
        assert validation_problem(caught.value, value, Whole).place == place


@pytest.mark.parametrize(
    ("map_", "message"),
    [
        ({"a": 1, "b": "x"}, "map.b: expected an integer, found 'x'"),
        ({"a": True}, "map.a: expected an integer, found true"),
        ({"5": None}, "map.5: expected an integer, found null"),
        ({"a.b": "x"}, "map[...]: expected `int`, got `str`"),
    ],
)
def test_a_misfit_in_a_map_names_the_key_where_that_can_be_written(map_: Any, message: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"map": map_}, Whole)

    assert validation_problem(caught.value, {"map": map_}, Whole).message == message


def test_a_misfit_in_a_map_by_itself_names_the_key() -> None:
    kind = dict[str, Annotated[float, Meta(gt=0)]]
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"a": 2, "b": -1.5}, kind)

    found = validation_problem(caught.value, {"a": 2, "b": -1.5}, kind)
    assert (found.place, found.problem) == ("b", "expected a number > 0, found -1.5")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "null"),
        (False, "false"),
        (-2.5, "-2.5"),
        ("x" * 80, repr("x" * 80)),
        ("x" * 81, "a string of 81 characters"),
        (["x"], "an array of 1 item"),
        ({"a": 1}, "an object"),
        (b"x", "a bytes"),
    ],
)
def test_a_value_is_described_shortly(value: object, words: str) -> None:
    assert described(value) == words
