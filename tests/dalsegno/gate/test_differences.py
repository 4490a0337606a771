from typing import Any

from dalsegno.gate import differences
from dalsegno.gate.differences import Difference, between, grouped


def difference(request_id: str = "r1", **fields: Any) -> Difference:
    usual: dict[str, Any] = {
        "level": "control",
        "event": "node.ready",
        "field": "walks[*].args.ignore_eos",
        "recorded": True,
        "found": False,
        "seq": 123,
    }
    return Difference(request_id=request_id, **usual | fields)


def test_leaves_are_named_without_their_place_in_a_list_and_stamps_are_left_out() -> None:
    was = {"writer": "c1", "number": 3, "walks": [{"args": {"k": 1}}, {"args": {"k": 2, "same": 0}}]}
    becomes = {"writer": "c2", "number": 4, "walks": [{"args": {"k": 1}}, {"args": {"k": 3, "same": 0}}]}
    assert list(between(was, becomes)) == [("walks[*].args.k", 2, 3)]


def test_a_value_that_exists_on_one_side_only_is_nothing_on_the_other() -> None:
    was, becomes = {"limits": {"a": 0}}, {"limits": {"a": 0, "concurrent": 1}}
    assert list(between(was, becomes)) == [("limits.concurrent", None, 1)]
    assert list(between(becomes, was)) == [("limits.concurrent", 1, None)]


def test_a_group_is_one_line_with_its_share_its_values_and_its_first_request() -> None:
    found = [difference(f"r{number}", seq=number) for number in range(17, 829)]
    [group] = grouped(found, {"control": 1000})
    assert differences.line_of(group) == (
        "control: 812 of 1,000: node.ready walks[*].args.ignore_eos true -> false, first r17 at 17"
    )


def test_two_differences_of_one_request_count_once_and_other_values_are_counted() -> None:
    found = [difference("r1"), difference("r1"), difference("r2", found=3), difference("r3", found=4)]
    [group] = grouped(found, {"control": 9})
    assert group.requests == 3
    assert "true -> false and 2 other values, first r1" in differences.line_of(group)


def test_groups_are_in_order_of_levels_then_the_largest_first() -> None:
    found = [
        difference(level="schedule", event="request.admitted", field="seed"),
        difference(field="small"),
        *(difference(f"r{number}", field="large") for number in range(3)),
    ]
    names = [(one.level, one.field) for one in grouped(found, {"control": 3, "schedule": 1})]
    assert names == [("control", "large"), ("control", "small"), ("schedule", "seed")]


def test_the_same_request_of_two_sources_counts_twice() -> None:
    [group] = grouped([difference(source="a"), difference(source="b")], {"control": 2})
    assert group.requests == 2


def test_a_long_value_is_cut_in_the_line() -> None:
    [group] = grouped([difference(found="x" * 500)], {"control": 1})
    assert len(differences.line_of(group)) < 250
