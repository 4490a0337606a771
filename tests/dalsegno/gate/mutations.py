"""Plausible mistakes in the code that schedules and reacts: each replaces a piece of one function's source.

A mutated function keeps its identity: only its code object is replaced, so that every module that imported it
runs the mutation too.
"""

import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from conductor.core import affinity, poison_pills, queue, react, retention, schedule
from conductor.core.cluster import Cluster
from conductor.core.replicas import Policy, Ranks


@dataclass(frozen=True, slots=True)
class Mutation:
    """One mistake: in `function`, `old` becomes `new`; `policy` is one that runs the piece."""

    name: str
    function: Callable[..., Any]
    old: str
    new: str
    policy: Policy = "fsfs"

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Run with the mistake.

        Raises:
            AssertionError: the function does not have the piece exactly once.
        """
        source = textwrap.dedent(inspect.getsource(self.function))
        assert source.count(self.old) == 1, f"{self.name}: {self.old!r} is not once in\n{source}"
        scope: dict[str, Any] = {}
        exec(
            compile(source.replace(self.old, self.new), f"<{self.name}>", "exec"),
            self.function.__globals__,
            scope,
        )
        [mutated] = scope.values()
        kept = self.function.__code__
        self.function.__code__ = mutated.__code__
        try:
            yield
        finally:
            self.function.__code__ = kept


SCHEDULING: Final = (
    Mutation("priorities are reversed", queue._sort_key, "(-request", "(request"),
    Mutation("deadlines are ignored", queue._sort_key, "inf if deadline_ns is None else deadline_ns", "inf"),
    Mutation("the latest deadline is first", queue._sort_key, "else deadline_ns", "else -deadline_ns"),
    Mutation(
        "tenants are not fair", queue._by_tenant, "(open_of[tenant], admission_counts[tenant], ", "(0, 0, "
    ),
    Mutation("open requests of tenants are not counted", queue._by_tenant, "(open_of[tenant], ", "(0, "),
    Mutation("admissions of tenants are not counted", queue._by_tenant, "admission_counts[tenant], ", "0, "),
    Mutation("the last submission is first", queue._by_tenant, "popleft()", "pop()"),
    Mutation(
        "a new tenant gets a backlog of turns",
        queue.normalized_admission_counts,
        "tenant, least)",
        "tenant, 0)",
    ),
    Mutation(
        "one request at a time", schedule.schedule, "deployment.max_concurrent_requests - open", "1 - open"
    ),
    Mutation("one request too many", schedule.schedule, "len(admitted) == free", "len(admitted) == free + 1"),
    Mutation("held requests are not counted", schedule.schedule, "len(places) + len(held)", "len(places)"),
    Mutation("one admission per record", schedule.schedule, "len(admitted) == free", "len(admitted) == 1"),
    Mutation("the refusal has another code", schedule.reject_overflow, '"queue_full"', '"overloaded"'),
    Mutation("the refusal has another status", schedule.reject_overflow, "status=_TOO_MANY", "status=503"),
    Mutation("seeds are derived otherwise", schedule.derived_seed, "digest_size=7", "digest_size=6"),
    Mutation("short answers begin one request early", schedule._limits, "taken > above", "taken >= above"),
    Mutation(
        "the share is not applied", schedule._limits, "if is_busy else 1.0", "if is_busy and False else 1.0"
    ),
    Mutation("a small cache does not limit a request", schedule._limits, "min([", "max(["),
    Mutation("the concurrent requests are one less", schedule._limits, "taken + 1", "taken"),
    Mutation(
        "the first suspect is first", schedule._resume, "(-request.submission_seq", "(request.submission_seq"
    ),
    Mutation(
        "suspects are resumed last",
        schedule._resume,
        "(*last_first, *others)",
        "(*others, *last_first)",
        "rr",
    ),
    Mutation("nobody is a suspect", schedule._suspected_on, "== request.id", "== object()"),
    Mutation(
        "a suspect takes any rank", schedule._quarantine_options, "return empty or ", "return there or "
    ),
    Mutation("a doubtful suspect need not be alone", schedule._quarantine_options, "if alone:", "if False:"),
    Mutation("a resumed request may get a small cache", schedule._large_enough, "] or ranks", "] and ranks"),
    Mutation(
        "nothing is closed for a suspect", schedule._resumption, "if not ranks.unproven[rank]", "if False"
    ),
    Mutation("incarnations are not named", schedule._lives, "is not None", "is None"),
    Mutation(
        "the first of the late ones are refused", Cluster._reject_overflow, "[-too_many:]", "[:too_many]"
    ),
    Mutation(
        "one more may wait",
        Cluster._reject_overflow,
        "- deployment.max_waiting)",
        "- deployment.max_waiting - 1)",
    ),
    Mutation(
        "nothing is refused for good",
        Cluster.schedule,
        "if (refusal := rejection(",
        "if None and (refusal := rejection(",
    ),
    Mutation("a conflict has another code", Cluster._submitted, '"request_id_conflict"', '"conflict"'),
    Mutation("a malformed request has another status", Cluster._malformed, "status=400", "status=422"),
    Mutation(
        "a second submission runs again",
        Cluster._submitted,
        "if digest is None:",
        "if digest is None or True:",
    ),
    Mutation("no digest is kept of what ended", Cluster._end, "self.digests[request.id] =", "_ ="),
    Mutation(
        "a place is kept after the end",
        Cluster._end,
        "(self.held, self._places, self.open)",
        "(self.held, self.open)",
    ),
    Mutation("a held request keeps its place", Cluster._adopt, "self._places.pop(request.id, None)", "pass"),
    Mutation("nobody is blamed", Cluster._blame, "in request.suspicion.alone_on", "in ()", "cache_aware"),
    Mutation(
        "the most loaded rank",
        Ranks._pick,
        '(self.load[one], one))\n            return rank, f"least',
        '(-self.load[one], one))\n            return rank, f"least',
    ),
    Mutation("the last of equal ranks", Ranks._pick, "(self.load[one], one))\n", "(self.load[one], -one))\n"),
    Mutation(
        "the shortest prefix",
        Ranks._pick,
        "(-cached[one]",
        "(cached[one]",
        "cache_aware",
    ),
    Mutation(
        "prefixes are not looked at",
        Ranks._pick,
        "if cached[rank]:",
        "if False:",
        "cache_aware",
    ),
    Mutation(
        "random is by the last byte",
        Ranks._pick,
        "int.from_bytes(digest)",
        "digest[-1]",
        "random",
    ),
    Mutation(
        "a turn is skipped",
        Ranks._next,
        ") % len",
        " + 1) % len",
        "rr",
    ),
    Mutation("one more per rank", Ranks.available_in, "< most", "<= most"),
    Mutation("one less per rank", Ranks.available_in, "< most", "< most - 1"),
    Mutation("a closed rank takes requests", Ranks.open_in, "if rank not in self.closed", ""),
    Mutation(
        "an absent rank takes requests", Ranks.open_in, " if self.world.incarnation(rank) is not None", ""
    ),
    Mutation("proven requests count as unproven", Ranks.occupy, "if not place.proven:", "if True:", "random"),
    Mutation(
        "prefixes have gaps",
        affinity.Affinity.has,
        "if name not in known",
        "if name in known",
        "cache_aware",
    ),
    Mutation(
        "prefixes outlive their rank",
        affinity.Affinity.forget,
        "self.prefixes.pop(rank, None)",
        "pass",
        "cache_aware",
    ),
    Mutation(
        "pieces do not contain what is before",
        affinity.pieces,
        "name + piece",
        "piece",
        "cache_aware",
    ),
)
"""Mistakes in what depends on all requests."""

REACTING: Final = (
    Mutation(
        "ended requests are forgotten at once",
        retention.trim_ended,
        "len(ended) <= limits.ended and",
        "False and",
    ),
    Mutation("one more attempt", poison_pills.exhausted, ">=", ">"),
    Mutation("deaths use up no attempt", poison_pills.uses_up_attempt, "is_conclusive\n", "False\n"),
    Mutation("a time limit has another code", react._deadline_failure, '"deadline_exceeded"', '"timeout"'),
)
"""Mistakes in what depends on one request."""
