"""The attacks can fail: what they forge, change and measure is what it claims to be."""

import asyncio
import shlex
from importlib import import_module
from pathlib import Path

import msgpack
import pytest
import yaml

from tests.attack import __main__ as command
from tests.attack import guides, kills, origins, tampering
from tests.attack.forged_events import HOMES, Aim, contents, forgeries, subjects
from tests.attack.forgery import documented, may_publish
from tests.attack.promises import Verdict, table
from tests.chaos.checker import Finding
from tests.e2e import pages
from tests.e2e.clients import ROOT

AIM = Aim(request_id="r1", origin="g-1", rank=0, incarnation=7, by=1, epoch=3)


def types_in_the_documentation() -> set[str]:
    schemas = yaml.safe_load((ROOT / "docs" / "asyncapi.yaml").read_text())["components"]["schemas"]
    tagged = (one.get("properties", {}).get("type", {}) for one in schemas.values())
    return {name for one in tagged for name in (one.get("enum") or [one.get("const")]) if name}


def test_every_type_of_event_in_the_documentation_is_forged() -> None:
    found = {name for name in types_in_the_documentation() if name.endswith(".v1")}

    assert found
    assert found - contents(AIM).keys() == set()
    assert HOMES.keys() == contents(AIM).keys()


def test_a_forgery_is_about_the_request_and_on_the_forgers_own_subject() -> None:
    for home, subject in subjects(AIM).items():
        for one in forgeries(AIM, home):
            assert one.subject == subject
            assert msgpack.unpackb(one.data, strict_map_key=False)["request_id"] == "r1"
    assert subjects(AIM)["output"] == "ds.output.g-1.r1.w1"


def test_the_documented_permissions_are_read_from_the_page() -> None:
    may = documented()
    assert may["reader"] == []
    assert may_publish("worker-0", "ds.output.g-1.r1.w0", may)
    assert may_publish("worker-12", "ds.done.12.r1", may)
    assert not may_publish("worker-1", "ds.done.0.r1", may)
    assert not may_publish("client", "ds.walk.r1", may)
    assert may_publish("client-billing", "ds.request.r1", may)


def test_every_leaf_of_an_event_is_changed_and_removed() -> None:
    event = {"a": 1, "b": {"c": b"x", "d": [{"e": True}]}, "f": []}
    changed = {name: msgpack.unpackb(data) for name, data in tampering._changed_fields(msgpack.packb(event))}

    assert changed["a plus one"]["a"] == 2
    assert "a" not in changed["a removed"]
    assert changed["b.c with a flipped bit"]["b"]["c"] == b"y"
    assert changed["b.d.0.e inverted"]["b"]["d"] == [{"e": False}]
    assert all(one != event for one in changed.values())


def test_a_percentile_is_by_nearest_rank() -> None:
    assert guides.p(50, [3.0, 1.0, 2.0]) == 2.0
    assert guides.p(99, [float(number) for number in range(200)]) == 197.0


def test_a_verdict_without_a_break_holds_and_one_that_was_not_attacked_does_not() -> None:
    held, broken = Verdict("a"), Verdict("b")
    held.expect("x", 1, 1)
    broken.expect("x|y", 1, 2)
    told = table([("f", held), ("g", broken)])

    assert held.is_held
    assert not broken.is_held
    assert not Verdict("c", missing="no such command").is_held
    assert "x/y: expected 2, found 1" in told
    assert "1 of 2 promises held under 2 attacks" in told


def test_an_attack_that_raises_is_no_promise_that_was_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(out: Path) -> list[Verdict]:
        raise OSError("no server")

    monkeypatch.setattr(origins, "attack", fails)
    [verdict] = command._attacked("origins", tmp_path / "origins", {})
    assert not verdict.is_held
    assert "no server" in verdict.result


def test_every_family_attacks() -> None:
    for family in command.FAMILIES:
        assert asyncio.iscoroutinefunction(import_module(f"tests.attack.{family}").attack)
    assert command.parse([]).families == list(command.FAMILIES)
    with pytest.raises(SystemExit):
        command.parse(["unknown"])


def test_every_command_of_the_page_asks_for_something_that_there_is() -> None:
    typed = [shlex.split(one.command) for one in pages.Page("docs/attacks.md").typed]
    args = [word.removeprefix("ARGS=") for words in typed for word in words if word.startswith("ARGS=")]
    assert args
    assert all(command.parse(shlex.split(one)).families for one in args)


def test_every_finding_of_the_checker_belongs_to_one_promise() -> None:
    kinds = {"a": {"lost"}, "b": {"twice"}, "rest": set[str]()}

    def promise(kind: str) -> str:
        return kills._promise_of(Finding(kind=kind, request_id="r", message=""), kinds)

    assert [promise("lost"), promise("twice"), promise("usage")] == ["a", "b", "rest"]
