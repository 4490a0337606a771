"""Forged events: every role writes every type of event about a running request of somebody else.

The NATS server is a real one with the permissions of `dalsegno init-security`. First, what each role may
publish is compared with the table in docs/security.md. Then each role publishes, while requests run,
everything that the server lets it publish. The answers, their repetition and their replay have to be what
they are without it.
"""

import asyncio
import fnmatch
import json
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import httpx
import msgpack

from tests.attack import target
from tests.attack.bus import Bus
from tests.attack.forged_events import HOMES, Aim, Forgery, forgeries, subjects
from tests.attack.promises import Verdict
from tests.attack.target import Guarded, Told, generate
from tests.chaos.checker import Stream
from tests.e2e.clients import ROOT

TOKENS: Final = 300
VICTIM: Final = "Tell me of a wizard."
BYSTANDER: Final = "Tell me of the sea."
DEPLOYED: Final = 2
SPARE: Final = 2
"""A rank with a key, which the deployment does not have."""
_ROLES: Final = ("worker-0", "worker-1", f"worker-{SPARE}", "gateway", "client", "client-billing", "reader")
_DOCUMENTED: Final = frozenset({"request.cancel.v1"})
"""Types that every service may publish about every request (docs/security.md): their effect is no break."""
_MEMBERSHIP: Final = frozenset({"worker.joined.v1", "worker.leaving.v1"})


async def attack(out: Path) -> list[Verdict]:
    """Forge events of every type with the key of every role."""
    permitted = Verdict("each role publishes exactly what docs/security.md says")
    unharmed = Verdict("no role changes a request that it does not execute or decide")
    deposed = Verdict("events of a deposed conductor and of an ended incarnation have no effect")
    sealed = Verdict("a log under attack is sealed, and dalsegno verify calls it intact")
    replayed = Verdict("answers under attack replay as they were given, and match")
    with target.guarded(out / "deployment", ranks=DEPLOYED, keys=SPARE + 1) as guarded:
        arena = await Arena.prepared(guarded)
        await _permissions(guarded, permitted)
        for role in _ROLES:
            await _by_role(arena, role, unharmed)
        await _by_the_deposed(arena, deposed)
        await _replays(arena, replayed)
        await _verified(guarded, sealed)
    return [permitted, unharmed, deposed, replayed, sealed]


# ---- what the server permits ---------------------------------------------------------------------------


def documented() -> dict[str, list[str]]:
    """By role, the subjects that docs/security.md lets it publish."""
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`[\w-]+`(?:, )?)+) \| (.+?) \|", text, re.MULTILINE)
    return {
        role: re.findall(r"`(ds\.[^`]+)`", granted)
        for roles, granted in rows
        for role in re.findall(r"`([\w-]+)`", roles)
    }


def may_publish(role: str, subject: str, table: Mapping[str, Sequence[str]]) -> bool:
    """True if the documentation lets `role` publish on `subject`."""
    known = role if role in table else "worker-0" if role.startswith("worker-") else role
    patterns = table.get(known, ())
    if known != role:  # the page names rank 0
        rank = role.removeprefix("worker-")
        patterns = [re.sub(r"(?<=[.w])0(?=\.|$)", rank, one) for one in patterns]
    return any(fnmatch.fnmatchcase(subject, one) for one in patterns)


async def _permissions(guarded: Guarded, verdict: Verdict) -> None:
    """Publish every type of event with every key: each is stored, or denied, as documented."""
    table = documented()
    for role in (*_ROLES, "conductor", "provisioner"):
        rank = int(role.removeprefix("worker-")) if role.startswith("worker-") else DEPLOYED - 1
        aims = [
            Aim(request_id="nobody", origin="nats", rank=0, incarnation=1, by=by, epoch=0) for by in range(3)
        ]
        sent = [
            Forgery(kind, subjects(aim)[home], {"type": "nothing.v1"})
            for aim in aims
            for kind, home in HOMES.items()
            if role != "worker" or aim.by == rank
        ]
        async with guarded.bus(role) as bus:
            stored = await bus.tell([(one.subject, one.data) for one in sent])
        for one, seq in zip(sent, stored, strict=True):
            expected = may_publish(role, one.subject, table)
            verdict.expect(f"{role} publishes {one.kind} on {one.subject}", seq is not None, expected)


# ---- the requests under attack --------------------------------------------------------------------------


@dataclass(slots=True)
class Arena:
    """Requests to attack, and what they are undisturbed.

    Attributes:
        expected: by text, the answer of an undisturbed run.
        ids: by event type, the ids of a request's genuine events, with `{}` for the request's id.
        attacked: the requests under attack so far, with the answer that the client received.
        own: those of them that the attacker executes itself.
    """

    guarded: Guarded
    expected: dict[str, Any] = field(default_factory=dict)
    ids: dict[str, list[str]] = field(default_factory=dict)
    attacked: dict[str, tuple[str, Told]] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)

    @classmethod
    async def prepared(cls, guarded: Guarded) -> "Arena":
        arena = cls(guarded)
        async with target.client(guarded.running) as http:
            for text in (VICTIM, BYSTANDER):
                told = await _ask(http, Told.new("undisturbed"), text)
                arena.expected[text] = told.answer
            for record in await guarded.records():
                event = _event(record.data)
                if event.get("request_id") == told.request_id and "id" in event:
                    pattern = event["id"].replace(told.request_id, "{}")
                    arena.ids.setdefault(event["type"], []).append(pattern)
        return arena

    async def under(self, attack: str, forge: "Forge") -> str:
        """Run the victim and the bystander while `forge` publishes; return the harm done, or nothing."""
        victim, bystander = Told.new("victim"), Told.new("bystander")
        async with target.client(self.guarded.running) as http, asyncio.TaskGroup() as tasks:
            tasks.create_task(_ask(http, victim, VICTIM))
            tasks.create_task(_ask(http, bystander, BYSTANDER))
            await victim.is_under_way.wait()
            assert victim.answer[2] == "no end", (
                f"the victim ended before the attack: {_short(victim.answer)}"
            )
            await forge(await self._aim(victim.request_id))
        for told, text in ((victim, VICTIM), (bystander, BYSTANDER)):
            self.attacked[told.request_id] = (attack, told)
            if told.answer != self.expected[text]:
                undisturbed = _short(self.expected[text])
                return f"{told.request_id} was answered {_short(told.answer)}, undisturbed {undisturbed}"
        return ""

    async def _aim(self, request_id: str) -> Aim:
        """Everything that a reader of the log knows about a request."""
        events = [(record.subject.split("."), _event(record.data)) for record in await self.guarded.records()]
        origin = next(words[2] for words, _ in events if words[1] == "output" and words[3] == request_id)
        rank = next(int(words[2]) for words, _ in events if words[1] == "ready" and words[3] == request_id)
        order = next(event for words, event in events if words[1] == "ready" and words[3] == request_id)
        index = sum(words[1] == "output" and words[3] == request_id for words, _ in events)
        return Aim(
            request_id=request_id,
            origin=origin,
            rank=rank,
            incarnation=order["incarnation"],
            by=rank,
            epoch=order["epoch"],
            next_index=index,
            ids={kind: [one.format(request_id) for one in found] for kind, found in self.ids.items()},
        )


async def _ask(http: httpx.AsyncClient, told: Told, text: str) -> Told:
    return await generate(http, told, text, max_tokens=TOKENS, ignore_eos=True)


def _event(data: bytes) -> dict[str, Any]:
    try:
        found = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, msgpack.UnpackException):
        return {}
    return found if isinstance(found, dict) else {}


def _short(answer: Any) -> str:
    data, tokens, end = answer
    return f"({data[:60]!r}... of {len(data)} bytes, {len(tokens)} tokens, {end})"


# ---- forging -------------------------------------------------------------------------------------------


class Forge:
    """Publishes a role's forgeries about the request that it is aimed at.

    Attributes:
        part: which of the forgeries: all of them, or those at these places.
        sent: the forgeries of the last call.
        own: requests that the forger itself executes: what it stores there is part of their history.
    """

    def __init__(self, guarded: Guarded, role: str, part: Sequence[int] | None = None) -> None:
        self._guarded, self._role, self._part = guarded, role, part
        self.sent: list[Forgery] = []
        self.own: set[str] = set()
        self.stored = 0

    async def __call__(self, aim: Aim) -> None:
        found = list(self._all(aim))
        self.sent = found if self._part is None else [found[place] for place in self._part]
        async with self._guarded.bus(self._role) as bus:
            if self._part is None:
                await _directed(bus, aim)
            stored = await bus.tell([(one.subject, one.data) for one in self.sent])
        self.stored = sum(seq is not None for seq in stored)

    def _all(self, aim: Aim) -> Iterator[Forgery]:
        """Every type of event on every subject that the role may publish on."""
        by = int(self._role.removeprefix("worker-")) if self._role.startswith("worker-") else aim.rank
        aimed = replace(aim, by=by, epoch=aim.epoch + 5)
        if self._role.startswith("worker-") and by == aim.rank:
            self.own.add(aim.request_id)
        for home, subject in subjects(aimed).items():
            if may_publish(self._role, subject, documented()):
                yield from self._on(aimed, home, is_own=by == aim.rank)

    def _on(self, aim: Aim, home: str, *, is_own: bool) -> Iterator[Forgery]:
        for one in forgeries(aim, home):
            belongs = HOMES[one.kind] == home
            if one.kind in _DOCUMENTED or (belongs and home == "worker"):
                continue
            if belongs and is_own and home in {"output", "done", "edge"}:
                continue  # the rank that executes the request is trusted with its own part of it
            yield one


async def _directed(bus: Bus, aim: Aim) -> None:
    """Direct replies of the server to subjects of others: whoever may read can have JSON stored anywhere."""
    for subject in subjects(aim).values():
        for asked in ("$JS.API.STREAM.INFO.DS_LOG", "$JS.API.CONSUMER.CREATE.DS_LOG.odd"):
            await bus.publish(asked, b"", reply=subject)
    await bus.flush()


async def _by_role(arena: Arena, role: str, verdict: Verdict) -> None:
    """All of a role's forgeries at once; if they do harm, the first that does it alone."""
    forge = Forge(arena.guarded, role)
    harm = await arena.under(f"all events of {role}", forge)
    arena.own |= forge.own
    verdict.tried(max(len(forge.sent), 1))
    if harm:
        one, harm = await _first(arena, role, list(range(len(forge.sent))), harm)
        verdict.broken(f"{role} publishes {one}", harm)


async def _first(arena: Arena, role: str, places: list[int], harm: str) -> tuple[str, str]:
    """Halve the forgeries until one remains that does harm alone; return it and the harm."""
    forge = Forge(arena.guarded, role, places)
    while len(places) > 1:
        for part in (places[: len(places) // 2], places[len(places) // 2 :]):
            forge = Forge(arena.guarded, role, part)
            if found := await arena.under(f"{len(part)} events of {role}", forge):
                places, harm = part, found
                break
        else:
            return f"{len(places)} events together, the last {forge.sent[-1]}", harm
    return str(forge.sent[0]) if forge.sent else str(places), harm


# ---- a deposed conductor, an ended incarnation ----------------------------------------------------------


async def _by_the_deposed(arena: Arena, verdict: Verdict) -> None:
    """The conductor's own key with an older epoch; a worker's own key with an older incarnation."""
    guarded = arena.guarded
    os.kill(guarded.running.pids.conductor[0], signal.SIGKILL)
    async with target.client(guarded.running) as http:
        await _ask(http, Told.new("after-the-conductor"), VICTIM)

    async def as_conductor(aim: Aim) -> None:
        old = replace(aim, epoch=aim.epoch - 1)
        homes = ("walk", "ready", "fence", "epoch", "lost")
        sent = [one for home in homes for one in forgeries(old, home) if HOMES[one.kind] == home]
        sent = [one for one in sent if one.event["writer"] == "conductor"]
        async with guarded.bus("conductor") as bus:
            await bus.tell([(one.subject, one.data) for one in sent])
        verdict.tried(len(sent))

    async def as_zombie(aim: Aim) -> None:
        sent = [
            one
            for home in ("output", "done", "edge")
            for one in forgeries(aim, home)
            if HOMES[one.kind] == home and one.event["incarnation"] != aim.incarnation
        ]
        sent = [replace(one, event=one.event | {"writer": f"w{aim.rank}"}) for one in sent]
        async with guarded.bus(f"worker-{aim.rank}") as bus:
            await bus.tell([(one.subject, one.data) for one in sent])
        verdict.tried(len(sent))

    for attack, forge in (
        ("an epoch that is over", as_conductor),
        ("an incarnation that is over", as_zombie),
    ):
        if harm := await arena.under(attack, forge):  # type: ignore[arg-type]
            verdict.broken(attack, harm)


# ---- replay --------------------------------------------------------------------------------------------


async def _verified(guarded: Guarded, verdict: Verdict) -> None:
    """The seals cover all of it, and nothing that a role may store looks like a change."""
    ended = await asyncio.to_thread(guarded.command, "verify")
    verdict.tried()
    if ended.returncode != 0:
        verdict.broken("dalsegno verify of the attacked log", f"{ended.stdout:.300} {ended.stderr:.300}")


async def _replays(arena: Arena, verdict: Verdict) -> None:
    """Every attacked request is asked for again, replayed, and compared with the log's own valid chunks."""
    stream = Stream(await arena.guarded.records())
    async with target.client(arena.guarded.running) as http:
        for request_id, (attack, told) in arena.attacked.items():
            text = VICTIM if request_id.startswith("victim") else BYSTANDER
            again = await _ask(http, Told(request_id, [], asyncio.Event()), text)
            verdict.expect(f"{attack}, asked again", again.answer, told.answer)
            tokens = tuple(stream.requests[request_id].tokens)
            verdict.expect(f"{attack}, by the log's rules", tokens, told.answer[1])
    ended = await asyncio.to_thread(arena.guarded.command, "replay", "--all", "--json")
    verdicts = {one["request_id"]: one for one in map(json.loads, ended.stdout.splitlines())}
    for request_id, (attack, _) in arena.attacked.items():
        if request_id in arena.own:
            continue  # garbage of the rank that executes a request belongs into its replay
        verdict.tried()
        found = verdicts.get(request_id, {})
        if not found.get("matches") or found.get("cannot_replay"):
            why = (found.get("mismatch") or {}).get("what") or found.get("cannot_replay") or ended.stderr
            verdict.broken(f"{attack}: dalsegno replay {request_id}", why)
