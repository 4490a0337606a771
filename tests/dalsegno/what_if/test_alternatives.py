"""The alternatives of a decision are those that the scheduler had, as its own recorded reasons tell."""

import ast
import re
from collections.abc import Iterator

import pytest

from conductor.core.replicas import Policy
from conductor.core.schedule import Deployment
from configs.placement import PlacedGroup
from dalsegno.gate.recorded_decisions import for_conductor, index
from dalsegno.what_if.alternatives import Alternatives, WeighedGroup, alternatives
from models import registry
from shared.events import RequestAdmitted, RequestResumed, decode
from shared.ids import Rank
from tests.conductor import script
from tests.conductor.script import SUBJECTS, Script
from tests.dalsegno.gate.rich_log import RichLog, rich_log

REASON = re.compile(r" on rank (\d+) of (\[[\d, ]+\]): (.*?)(?:;|$)")


def weighed(log: RichLog, seq: int) -> Alternatives:
    found = alternatives(log.records, lambda made: dict.fromkeys(made.epochs, log.deployment), SUBJECTS, seq)
    assert isinstance(found, Alternatives), found
    return found


def choices(log: RichLog, kind: type) -> list[int]:
    """The positions of all decisions of a kind that count."""
    records = [one for one in log.records if for_conductor(one.subject, SUBJECTS)]
    epochs = index(records, SUBJECTS, registry.graph).epochs.values()
    return sorted(one.seq for epoch in epochs for one in epoch.made.values() if isinstance(one.event, kind))


def possible(group: WeighedGroup) -> list[int]:
    return [one.rank for one in group.ranks if one.verdict in ("chosen", "possible")]


@pytest.mark.parametrize("policy", ["fsfs", "rr", "random", "cache_aware"])
def test_they_are_those_of_the_recorded_reason(policy: Policy) -> None:
    log = rich_log(3, policy)
    seqs = choices(log, RequestAdmitted)
    assert len(seqs) > 20
    several = 0
    for seq in seqs[:: max(1, len(seqs) // 25)]:
        found = weighed(log, seq)
        for group, told in zip(found.groups, REASON.finditer(found.reason), strict=False):
            [chosen] = [one for one in group.ranks if one.verdict == "chosen"]
            assert chosen.decided
            assert (chosen.rank, possible(group)) == (int(told[1]), ast.literal_eval(told[2]))
            several += len(possible(group)) > 1
            if "least loaded" in told[3]:
                assert told[3] == f"least loaded, {chosen.open_requests} open requests"
            if "pieces of the prompt" in told[3]:
                assert told[3] == f"its cache has {chosen.cached} of {found.pieces} pieces of the prompt"
    assert several


def test_the_line_has_those_that_wait_in_the_order_of_their_turns() -> None:
    log = rich_log(3, "fsfs")
    seqs = choices(log, RequestAdmitted)
    lines = [weighed(log, seq) for seq in seqs[:: max(1, len(seqs) // 15)]]
    assert max(one.waiting for one in lines) > 1
    for one in lines:
        priorities = [waiting.priority for waiting in one.queue]
        assert priorities == sorted(priorities, reverse=True)
        assert one.open_requests < one.most


def test_a_resumption_is_weighed_too() -> None:
    log = rich_log(3, "fsfs")
    found = [weighed(log, seq) for seq in choices(log, RequestResumed)[:10]]
    assert found
    for one in found:
        assert one.queue == []
        assert all(sum(rank.verdict == "chosen" for rank in group.ranks) == 1 for group in one.groups)


def three(**changes: object) -> Script:
    """Three replicas, of which the second one is absent."""
    group = PlacedGroup(nodes=("prepare", "llm"), walks=None, ranks=(Rank(0), Rank(1), Rank(2)))
    log = Script(serve=script.deployment(groups=(group,), **changes))
    log.open_epoch()
    for rank in (0, 2):
        log.join(f"w{rank}-a", rank)
    return log


def verdicts(log: Script, request_id: str) -> Iterator[tuple[int, int, str]]:
    [seq] = [
        record.seq
        for record in log.records
        if isinstance(event := decode(record.data), RequestAdmitted) and event.request_id == request_id
    ]
    found = weighed(RichLog(log.records, log.deployment), seq)
    for one in found.groups[0].ranks:
        yield one.rank, one.open_requests, one.verdict


def test_each_rank_that_was_not_taken_says_why() -> None:
    log = three(max_per_replica=1)
    log.submit("r1")
    log.submit("r2")
    assert list(verdicts(log, "r1")) == [(0, 0, "chosen"), (1, 0, "absent"), (2, 0, "possible")]
    assert list(verdicts(log, "r2")) == [(0, 1, "full"), (1, 0, "absent"), (2, 0, "chosen")]


def test_where_the_code_decides_otherwise_both_choices_are_told() -> None:
    log = three()
    log.submit("r1")
    other = script.deployment(groups=(PlacedGroup(nodes=("prepare", "llm"), walks=None, ranks=(Rank(2),)),))
    found = weighed(RichLog(log.records, other), seq=choices(RichLog(log.records, other), RequestAdmitted)[0])
    assert [(one.rank, one.verdict, one.decided) for one in found.groups[0].ranks] == [(2, "possible", True)]


@pytest.mark.parametrize(
    ("deployment", "says"), [("its configuration is not stored", "not stored"), (None, "no admission")]
)
def test_what_is_not_known_is_said(deployment: str | None, says: str) -> None:
    log = three()
    log.submit("r1")
    known: Deployment | str = deployment or log.deployment
    seq = choices(RichLog(log.records, log.deployment), RequestAdmitted)[0] - (0 if deployment else 1)
    found = alternatives(log.records, lambda made: dict.fromkeys(made.epochs, known), SUBJECTS, seq)
    assert isinstance(found, str)
    assert says in found
