"""Changed histories: every field of every record, in bundles with recomputed digests, and in the log itself.

The forger knows all of our code and computes every digest and chain again; only the private key is out of
reach. `dalsegno verify` must not call the result intact, `dalsegno replay` must not pass over it, and a log
that was changed, cut or exchanged must not agree with its seals and anchors.
"""

import asyncio
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgpack
import msgspec
from click.testing import CliRunner

from dalsegno.bundle import bundle_file
from dalsegno.bundle.bundle_file import Bundle, BundledRecord, digest_of
from dalsegno.cli import main
from shared.log.port import StoredRecord
from tests.attack import target
from tests.attack.promises import Verdict
from tests.attack.target import MODEL, Told, chat, generate
from tests.e2e import clients
from tests.e2e.deploy import Running

Place: TypeAlias = tuple[str | int, ...]
_SEALED: Final = "ds.conductor.sealed"
_ENVELOPE: Final = frozenset({"id", "writer", "number", "epoch", "trace"})
"""Fields of a seal's event besides the signed statement: they say nothing about the log."""
_MEMBERSHIP: Final = ("ds.worker.", "ds.conductor.epoch", "ds.conductor.lost")


async def attack(out: Path) -> list[Verdict]:
    """Make histories, and change them."""
    verified = Verdict("dalsegno verify notices every change in a re-chained bundle")
    replayed = Verdict("dalsegno replay notices every change in a re-chained bundle")
    logged = Verdict("the seals of a log notice every change, cut and exchange")
    accepted = Verdict("untouched bundles and logs are intact")
    state = out / "state"
    with target.served(out / "deployment", env={"XDG_STATE_HOME": str(state)}) as running:
        ids = await _histories(running)
        bundles = [await asyncio.to_thread(_exported, running, out, one) for one in ids]
        records = await _records(running)
    tool = Tool(state)
    await asyncio.to_thread(_bundles, tool, bundles, accepted, verified, replayed)
    await asyncio.to_thread(_data_dirs, tool, running.data_dir, out, logged, accepted)
    _logs(records, logged)
    await _rolled_back(tool, out, state, logged, accepted)
    return [accepted, verified, replayed, logged]


def _bundles(
    tool: "Tool", bundles: Sequence[Path], accepted: Verdict, verified: Verdict, replayed: Verdict
) -> None:
    """Change every bundle in every way."""
    for path in bundles:
        accepted.expect(f"replay of {path.name}", tool.run("replay", str(path)), 0)
        accepted.expect(f"verify of {path.name}", tool.run("verify", str(path)), 0)
        for name, changed in _changed_bundles(bundle_file.read(str(path))):
            file = path.with_name("changed.bundle")
            _judge(tool, file, changed, f"{path.stem}: {name}", verified, replayed)
        for name, changed in _unsealed_bundles(bundle_file.read(str(path))):
            file = path.with_name("changed.bundle")
            _judge(tool, file, changed, f"{path.stem}: {name}", verified)


class Tool:
    """The command line, run in this process, with the keys and anchors of the attacked deployment."""

    def __init__(self, state: Path) -> None:
        self._env = {"XDG_STATE_HOME": str(state)}
        self.output = ""

    def run(self, *args: str) -> int:
        """Run a command; return its exit status."""
        result = CliRunner(env=self._env).invoke(main, list(args))
        self.output = result.output
        return result.exit_code


async def _histories(running: Running) -> list[str]:
    """Requests of every kind: several parts, cancelled, with sound-like data, with log probabilities."""
    async with target.client(running) as http:
        await generate(http, Told("plain", [], asyncio.Event()), "hello", max_tokens=12, ignore_eos=True)
        asked: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": "a b", "n": 2, "seed": 3, "logprobs": 1, "echo": True,
                                 "max_tokens": 6, "model": MODEL, "request_id": "parts"}),
            ("/v1/embeddings", {"input": "a b", "model": MODEL, "request_id": "vector"}),
            ("/v1/chat/completions", chat("a b", max_tokens=6, request_id="chat")),
        ]  # fmt: skip
        for route, body in asked:
            (await http.post(route, json=body)).raise_for_status()
        cancelled = Told("cancelled", [], asyncio.Event())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(generate(http, cancelled, "hello", max_tokens=450, ignore_eos=True))
            await cancelled.is_under_way.wait()
            await http.delete("/v1/requests/cancelled")
    return ["plain", "parts", "vector", "chat", "cancelled"]


def _exported(running: Running, out: Path, request_id: str) -> Path:
    path = out / f"{request_id}.bundle"
    args = ["export", request_id, "-o", str(path), "--payloads", "--data-dir", str(running.data_dir)]
    tool = Tool(out / "state")
    status = tool.run(*args)
    assert status == 0, tool.output
    return path


async def _records(running: Running) -> list[StoredRecord]:
    async with clients.log_of(running, running.reader) as log:
        return [record async for record in log.history(["ds.>"])]


# ---- bundles -----------------------------------------------------------------------------------------------


def _judge(
    tool: Tool, path: Path, changed: Bundle, name: str, verified: Verdict, replayed: Verdict | None = None
) -> None:
    with path.open("wb") as file:
        bundle_file.write(file, changed.header, changed.kept)
    verified.tried()
    if tool.run("verify", str(path)) == 0:
        verified.broken(name, "verify calls it intact")
    if replayed is None:
        return
    replayed.tried()
    if tool.run("replay", str(path)) == 0:
        replayed.broken(name, "replay accepts it")


def _changed_bundles(bundle: Bundle) -> Iterator[tuple[str, Bundle]]:
    """Every single change of a bundle, with digests computed again."""
    for place, one in enumerate(bundle.kept):
        if one.record.subject == _SEALED:
            continue
        where = f"record {one.record.seq} on {one.record.subject}"
        for field, data in _changed_fields(one.record.data):
            yield f"{where}, {field}", _with(bundle, place, msgspec.structs.replace(one.record, data=data))
        record = one.record
        later = msgspec.structs.replace(record, time_ns=record.time_ns + 1)
        yield f"{where}, its time", _with(bundle, place, later)
        elsewhere = msgspec.structs.replace(record, subject=f"{record.subject}x")
        yield f"{where}, its subject", _with(bundle, place, elsewhere)
        yield f"{where}, removed", _of(bundle, [*bundle.kept[:place], *bundle.kept[place + 1 :]])
        if place + 1 < len(bundle.kept) and bundle.kept[place + 1].record.subject != _SEALED:
            yield f"{where}, swapped with the next", _swapped(bundle, place)
            yield f"{where}, doubled over the next", _with(bundle, place + 1, _at(record, bundle, place + 1))


def _unsealed_bundles(bundle: Bundle) -> Iterator[tuple[str, Bundle]]:
    """Changes of the seals, alone and together with what they cover."""
    places = [place for place, one in enumerate(bundle.kept) if one.record.subject == _SEALED]
    yield "without its seals", _without(bundle, places)
    for place in places:
        record = bundle.kept[place].record
        for field, data in _changed_fields(record.data):
            if field.partition(" ")[0] not in _ENVELOPE:
                changed = _with(bundle, place, msgspec.structs.replace(record, data=data))
                yield f"the seal {record.seq}, {field}", changed
    for place, one in enumerate(bundle.kept):
        if one.record.subject.startswith(_MEMBERSHIP):
            where = f"record {one.record.seq} on {one.record.subject} removed"
            for seal in places:
                yield f"{where}, and seal {bundle.kept[seal].record.seq}", _without(bundle, [place, seal])
            yield f"{where}, and all seals but the last", _without(bundle, [place, *places[:-1]])


def _without(bundle: Bundle, places: Sequence[int]) -> Bundle:
    return _of(bundle, [one for place, one in enumerate(bundle.kept) if place not in places])


def _with(bundle: Bundle, place: int, record: StoredRecord) -> Bundle:
    kept = list(bundle.kept)
    kept[place] = BundledRecord(record=record, digest=digest_of(record.data))
    return _of(bundle, kept)


def _of(bundle: Bundle, kept: Sequence[BundledRecord]) -> Bundle:
    return msgspec.structs.replace(bundle, kept=list(kept))


def _at(record: StoredRecord, bundle: Bundle, place: int) -> StoredRecord:
    """The record in another place: with the position and the time of the record there."""
    other = bundle.kept[place].record
    return msgspec.structs.replace(record, seq=other.seq, time_ns=other.time_ns)


def _swapped(bundle: Bundle, place: int) -> Bundle:
    first, second = bundle.kept[place].record, bundle.kept[place + 1].record
    changed = _with(bundle, place, _at(second, bundle, place))
    return _with(changed, place + 1, _at(first, bundle, place + 1))


def _changed_fields(data: bytes) -> Iterator[tuple[str, bytes]]:
    """The event with one field changed or removed, for each of its fields, however deep."""
    event = msgpack.unpackb(data, strict_map_key=False) if data[:1] != b"{" else msgspec.json.decode(data)
    pack = msgpack.packb if data[:1] != b"{" else msgspec.json.encode
    for place in _leaves(event):
        for how, value in _others(_get(event, place)):
            changed = deepcopy(event)
            _get(changed, place[:-1])[place[-1]] = value
            yield f"{'.'.join(map(str, place))} {how}", bytes(pack(changed))
        if isinstance(place[-1], str):
            changed = deepcopy(event)
            del _get(changed, place[:-1])[place[-1]]
            yield f"{'.'.join(map(str, place))} removed", bytes(pack(changed))


def _leaves(value: Any, place: Place = ()) -> Iterator[Place]:
    if isinstance(value, Mapping) and value:
        for name, one in value.items():
            yield from _leaves(one, (*place, name))
    elif isinstance(value, list) and value and isinstance(value[0], Mapping | list):
        for number, one in enumerate(value[:2]):
            yield from _leaves(one, (*place, number))
    else:
        yield place


def _get(value: Any, place: Place) -> Any:
    for name in place:
        value = value[name]
    return value


def _others(value: Any) -> Iterator[tuple[str, Any]]:
    """Another value of the same type."""
    match value:
        case bool():
            yield "inverted", not value
        case int() | float():
            yield "plus one", value + 1
        case str():
            yield "longer", f"{value}x"
        case bytes():
            yield "with a flipped bit", bytes([value[0] ^ 1, *value[1:]]) if value else b"x"
        case list():
            yield "without its first", value[1:] if value else [1]
        case _:
            yield "something", 1


# ---- the log -----------------------------------------------------------------------------------------------


def _data_dirs(tool: Tool, data_dir: Path, out: Path, logged: Verdict, accepted: Verdict) -> None:
    """Whole data dirs: untouched, and with block files that are cut off."""
    accepted.expect("verify of the data dir", tool.run("verify", "--data-dir", str(data_dir)), 0)
    cut = out / "cut"
    shutil.copytree(data_dir, cut)
    blocks = sorted(cut.rglob("*.blk"))
    for block in blocks:
        os.truncate(block, block.stat().st_size // 2)
    logged.tried()
    if tool.run("verify", "--data-dir", str(cut)) == 0:
        logged.broken("half of each block file cut off", f"verify calls it intact: {tool.output:.300}")


async def _rolled_back(tool: Tool, out: Path, state: Path, logged: Verdict, accepted: Verdict) -> None:
    """An old copy of the data dir in the place of the present one, before and after it is served."""
    folder, env = out / "rolled-back", {"XDG_STATE_HOME": str(state)}
    verify = ("verify", "--data-dir", str(folder / "data"))
    for attack, is_broken in (("served", False), ("served again", False), ("rolled back and served", True)):
        if is_broken:
            shutil.rmtree(folder / "data")
            shutil.copytree(out / "old", folder / "data")
            logged.tried()
            if await asyncio.to_thread(tool.run, *verify) == 0:
                logged.broken("rolled back", f"verify calls it intact: {tool.output:.300}")
        with target.served(folder, env=env) as running:
            async with target.client(running) as http:
                for _ in range(3):
                    await generate(http, Told.new("request"), "hello", max_tokens=4)
        verdict = logged if is_broken else accepted
        verdict.tried()
        status = await asyncio.to_thread(tool.run, *verify)
        if (status != 0) is not is_broken:
            verdict.broken(attack, f"verify ends with {status}: {tool.output:.300}")
        if attack == "served":
            shutil.copytree(folder / "data", out / "old")


def _logs(records: Sequence[StoredRecord], logged: Verdict) -> None:
    """Every change of a record of the log, checked against its seals."""
    seals = [one for one in records if one.subject == _SEALED]
    if not seals:
        logged.missing = "the log has no seals"
        return
    checked = SealedRecords(records)
    logged.expect("the untouched log", checked.findings(records), [])
    for name, changed in _changed_logs(records, seals[-1].seq):
        logged.tried()
        if not checked.findings(changed):
            logged.broken(name, "the seals agree")


class SealedRecords:
    """A log with its seals, to be compared with changed versions of it."""

    def __init__(self, records: Sequence[StoredRecord]) -> None:
        from shared.sealing import anchors, seals  # noqa: PLC0415 - a version without seals has no such package

        signed = [seals.read(one) for one in records if one.subject == _SEALED]
        self._anchors = [anchors.anchor_of(one) for one in signed]
        self._trusted = frozenset(one.key for one in signed)
        self._log = signed[0].seal

    def findings(self, records: Sequence[StoredRecord]) -> list[str]:
        """The findings that are not explained by the log's normal operation."""
        from shared.sealing.findings import Level  # noqa: PLC0415
        from shared.sealing.log_check import LogCheck, LogExtent  # noqa: PLC0415
        from shared.subjects import Subjects  # noqa: PLC0415

        extent = LogExtent(
            stream=self._log.stream,
            created_ns=self._log.created_ns,
            first_seq=records[0].seq,
            last_seq=records[-1].seq,
            now_ns=records[-1].time_ns,
        )
        seals = [one for one in records if one.subject == _SEALED]
        check = LogCheck(extent, seals, Subjects(), trusted=self._trusted, anchors=self._anchors)
        for record in records:
            check.take(record)
        return [one.kind for one in check.report().findings if one.level is not Level.NOTE]


def _changed_logs(
    records: Sequence[StoredRecord], last_seal: int
) -> Iterator[tuple[str, list[StoredRecord]]]:
    """Every change up to the last seal; what follows it is not sealed yet."""
    replace = msgspec.structs.replace
    for place, one in enumerate(records):
        if one.seq >= last_seal:
            break
        head, tail = list(records[:place]), list(records[place + 1 :])
        where = f"record {one.seq} on {one.subject}"
        flipped = bytes([*one.data[:-1], one.data[-1] ^ 1])
        yield f"{where}, a bit", [*head, replace(one, data=flipped), *tail]
        yield f"{where}, its time", [*head, replace(one, time_ns=one.time_ns + 1), *tail]
        yield f"{where}, its subject", [*head, replace(one, subject=f"{one.subject}x"), *tail]
        yield f"{where}, removed", [*head, *tail]
        after = records[place + 1]
        swapped = [
            replace(after, seq=one.seq, time_ns=one.time_ns),
            replace(one, seq=after.seq, time_ns=after.time_ns),
        ]
        if after.seq < last_seal:
            yield f"{where}, swapped with the next", [*head, *swapped, *tail[1:]]
        if place:
            yield f"all up to {where} removed", [one, *tail]
            yield f"all from {where} on removed", head
    yield "all seals removed", [one for one in records if one.subject != _SEALED]
