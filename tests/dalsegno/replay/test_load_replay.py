import msgspec
import pytest

from dalsegno.history.reply import Reply
from dalsegno.replay import load_replay
from dalsegno.replay.load_replay import Arrival, Arrivals
from shared.errors import ClientError
from shared.events import Params, RequestCancelled, decode, encode
from shared.log.port import StoredRecord
from tests.conductor.script import SUBJECTS, Script
from tests.dalsegno.histories import answered, bundled


def arrivals(records: list[StoredRecord], *, is_redacted: bool = False) -> list[Arrival]:
    found = Arrivals()
    for record in records:
        found.take(record, SUBJECTS, is_redacted=is_redacted)
    return found.in_order()


def three() -> list[StoredRecord]:
    script = Script()
    script.open_epoch()
    script.join()
    for name in ("a", "b", "c"):
        script.submit(name)
        script.run_to_the_end(name)
    return script.records


def test_they_are_asked_again_as_far_apart_as_they_came() -> None:
    found = arrivals(three())
    assert [one.request_id for one in found] == ["a", "b", "c"]
    asked = load_replay.submissions(found, "other", speed=2.0)
    starts = [one.reply.submitted_ns for one in found]
    assert [one.after_s for one in asked] == [(start - starts[0]) / 2e9 for start in starts]
    assert asked[0].after_s == 0.0
    assert len({one.event.request_id for one in asked}) == 3
    assert {one.event.model for one in asked} == {"other"}


def test_each_has_the_question_the_seed_and_the_lineage() -> None:
    [one] = arrivals(answered("What?", params=Params(max_tokens=4), parent="r1", parts=1))
    [asked] = load_replay.submissions([one], "demo", speed=1.0)
    assert asked.event.inputs.text == "What?"
    assert one.admitted is not None
    assert asked.event.params == Params(max_tokens=4, seed=one.admitted.seed)
    assert asked.event.parent is None
    assert asked.event.forked_from is not None
    assert (asked.event.forked_from.request_id, asked.event.forked_from.seq) == ("r1", 3)


def test_of_redacted_ones_the_sizes() -> None:
    _, kept = bundled(answered("secret"), redact=True)
    [one] = arrivals([each.record for each in kept], is_redacted=True)
    [asked] = load_replay.submissions([one], "demo", speed=1.0)
    assert asked.event.inputs.token_ids == [0, 0, 0]
    assert (asked.event.params.max_tokens, asked.event.params.ignore_eos) == (3, True)


def test_the_size_of_a_redacted_prompt_that_was_never_told_is_not_made_up() -> None:
    _, kept = bundled(answered("secret")[:-1], redact=True)
    [one] = arrivals([each.record for each in kept], is_redacted=True)
    with pytest.raises(ClientError, match="r1 is redacted and did not finish"):
        load_replay.submissions([one], "demo", speed=1.0)


def test_what_was_cancelled_is_asked_for_as_far_as_it_came() -> None:
    records = [
        r for r in answered() if not isinstance(decode(r.data, r.subject.split(".")[1]), RequestCancelled)
    ]
    cancelled = RequestCancelled(
        id="r1.end", writer="conductor", epoch=1, request_id="r1", reason="x", history=b""
    )
    records[-1] = msgspec.structs.replace(records[-1], data=encode(cancelled))
    [one] = arrivals(records)
    [asked] = load_replay.submissions([one], "demo", speed=1.0)
    assert asked.event.params.max_tokens == 3


def test_what_was_not_let_in_is_not_asked_again() -> None:
    script = Script()
    script.open_epoch()
    script.join()
    script.submit("r1", model="nobody")
    assert arrivals(script.records) == []


def test_both_are_told_side_by_side() -> None:
    found = arrivals(three())
    now = {one.request_id: Reply() for one in found}
    for name, one in zip(now, found, strict=True):
        now[name] = one.reply
    lines, data = load_replay.report(found, now, 1.0)
    assert lines[0] == "load replay of 3 requests at 1 times the speed they came with"
    assert load_replay.report(found[:1], now, 2.0)[0][0].startswith("load replay of 1 request at 2 times")
    assert [line.split() for line in lines if line.startswith("finished")] == [["finished", "3", "3"]]
    assert data["level"] == "load"
    assert data["recorded"] == data["now"]
    assert data["recorded"]["tokens"] == 12
    assert [one["request_id"] for one in data["requests"]] == ["a", "b", "c"]


def test_nothing_is_said_of_times_that_were_not() -> None:
    found = arrivals(three())
    now = {one.request_id: Reply() for one in found}
    lines, _ = load_replay.report(found, now, 1.0)
    assert [line.split()[-1] for line in lines if line.startswith("first chunk, p50")] == ["-"]
