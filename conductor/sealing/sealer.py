"""The sealer: the leading conductor's task that stores seals of the log.

It reads all records in bulk, folds them into a segment (`shared.sealing.segment`), and stores a statement
about it: soon after a request's end, at intervals, and when the conductor stops. No decision waits for it. A
seal is stored with the expected last sequence number of its subject, so that of two conductors which take
themselves for the leader only one continues the chain; the other one reads the new seal and follows it.

While the log is nearly full or away, seals wait.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from contextlib import aclosing
from typing import Final, NamedTuple

from conductor.sealing.anchoring import Anchoring
from shared.errors import CapacityError
from shared.events import encode
from shared.log.port import Log, LogFullError, StoredRecord, WrongLastSequenceError
from shared.sealing import seals
from shared.sealing.anchors import anchor_of
from shared.sealing.keys import SigningKey, fingerprint
from shared.sealing.seals import BadSealError, Seal, SignedSeal
from shared.sealing.segment import MAX_MEMBERS, MAX_REQUESTS, LogIdentity, Segment
from shared.subjects import Subjects

_LOGGER: Final = logging.getLogger(__name__)

AFTER_END_S: Final = 0.15
"""The time from a request's end to its seal: other requests that end meanwhile share it."""
_RETRY_S: Final = 1.0
_LAST_SEAL_S: Final = 3.0
"""The time that a conductor which stops has for its last seal."""
_ENTRY_BYTES: Final = 256
_HEAD_BYTES: Final = 16 * 1024 + MAX_MEMBERS * 48
"""Upper limits of the size of a request's entry, and of the rest of a seal."""
_YIELD_EVERY: Final = 50
"""Records that are folded at once (0.2 ms) before decisions get their turn."""


class View(NamedTuple):
    """The conductor's state, as far as seals depend on it.

    Attributes:
        leads: this conductor leads.
        epoch: its epoch.
        epoch_seq: the position of the record that opened it.
        seq: the last record that was folded.
        open: the requests whose end was not recorded then.
        has_capacity: the log has capacity for more than running requests.
    """

    leads: bool
    epoch: int
    epoch_seq: int
    seq: int
    open: Collection[str]
    has_capacity: bool


class Sealer:
    """The task; `run` it for as long as the conductor runs.

    Args:
        log: the log.
        subjects: its subjects.
        key: the signing key.
        trusted: public keys of seals that are no surprise in the log.
        interval_s: the time between seals while there are new records.
        max_age_s: the log's retention.
        anchoring: gets the position and chain value of each seal.
    """

    def __init__(
        self,
        log: Log,
        subjects: Subjects,
        key: SigningKey,
        *,
        trusted: frozenset[bytes] = frozenset(),
        interval_s: float,
        max_age_s: float,
        anchoring: Anchoring | None = None,
    ) -> None:
        self._log = log
        self._subjects = subjects
        self._key = key
        self._trusted = trusted | {key.public}
        self._interval_s = interval_s
        self._max_age_s = max_age_s
        self._anchoring = anchoring
        self._view: Callable[[], View] = lambda: View(False, 0, 0, 0, (), False)
        self._ended = asyncio.Event()
        self._leads = asyncio.Event()
        self._segment: Segment | None = None
        self._last_seq = 0  # the last record on the seals' subject
        self._now = asyncio.Lock()

    def attach(self, view: Callable[[], View]) -> None:
        """Set the source of the conductor's state; called once, before `run`."""
        self._view = view

    def lead(self) -> None:
        """Begin to seal: the conductor leads."""
        self._segment = None  # another conductor may have sealed meanwhile
        self._leads.set()

    def request_ended(self) -> None:
        """Seal soon: a request's end is in the log."""
        self._ended.set()

    async def run(self) -> None:
        """Seal while leading, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if self._anchoring is not None:
                tasks.create_task(self._anchoring.run(), name="anchors")
            while True:
                await self._leads.wait()
                if not self._view().leads:
                    self._leads.clear()
                    continue
                await self.seal_all()
                await self._until_due()

    async def finish(self) -> None:
        """Store the last seal and its anchors, if this conductor led."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_SEAL_S):
                if self._leads.is_set():
                    await self.seal_all()
                if self._anchoring is not None:
                    await self._anchoring.flush()

    async def seal_all(self) -> None:
        """Seal everything that is in the log now; if that is not possible, leave it for later."""
        async with self._now:
            try:
                await self._seal_all()
            except WrongLastSequenceError:
                _LOGGER.info("another conductor sealed first: continuing after its seal")
                self._segment = None
            except CapacityError as error:
                _LOGGER.warning("the log cannot be sealed now: %s", error.message)
                await asyncio.sleep(_RETRY_S)

    async def _until_due(self) -> None:
        try:
            async with asyncio.timeout(self._interval_s):
                await self._ended.wait()
            await asyncio.sleep(AFTER_END_S)
        except TimeoutError:
            pass
        self._ended.clear()

    # ---- one seal after another --------------------------------------------------------------------
    async def _seal_all(self) -> None:
        is_all = False
        while not is_all:
            view = self._view()  # before the log's end is known: it must not know more than the log
            if not view.leads or not view.has_capacity:
                return
            state = await self._log.state()
            if self._segment is None:
                identity = LogIdentity(
                    stream=self._subjects.stream, created_ns=state.created_ns, max_age_s=self._max_age_s
                )
                self._segment = await self._continued(identity, view)
            segment = self._segment
            segment.skip_expired(state.first_seq)
            if state.last_seq == self._last_seq == segment.last_seq + 1:
                return  # only our own seal is new
            await self._read(segment, state.last_seq)
            is_all = not segment.is_full
            if segment.has_news:
                await self._store(segment, view)

    async def _read(self, segment: Segment, last_seq: int) -> None:
        if segment.last_seq >= last_seq:
            return
        records = self._log.history(self._subjects.logged(), segment.last_seq + 1, last_seq)
        async with aclosing(records):
            async for record in records:
                segment.add(record)
                if segment.is_full:
                    return
                if segment.count % _YIELD_EVERY == 0:
                    await asyncio.sleep(0)

    async def _store(self, segment: Segment, view: View) -> None:
        most = max(1, (self._log.max_payload - _HEAD_BYTES) // _ENTRY_BYTES)
        seal = segment.draft(view.open, view.seq, max_requests=min(MAX_REQUESTS, most))
        event = encode(seals.signed(seal, self._key, view.epoch))
        self._segment = None  # if this is cancelled, it is unknown whether the seal is stored
        try:
            await self._publish(event)
        except LogFullError:  # it is not stored
            self._segment = segment
            raise
        segment.stored(seal)
        self._segment = segment
        if self._anchoring is not None:
            self._anchoring.put(anchor_of(SignedSeal(seq=self._last_seq, seal=seal, key=self._key.public)))

    async def _publish(self, event: bytes) -> None:
        """Store a seal after the last one. Records that are no seals may come in between (ADR 11).

        Raises:
            WrongLastSequenceError: another conductor stored a seal.
        """
        while True:
            try:
                self._last_seq = await self._log.publish(
                    self._subjects.sealed, event, expected_last_seq=self._last_seq, waits_while_full=False
                )
            except WrongLastSequenceError:
                if not await self._passes_foreign_records():
                    raise
            else:
                return

    async def _passes_foreign_records(self) -> bool:
        """Note the last record on the seals' subject; return False if a seal is among the new ones.

        If all of them have expired, the next seal is the first on the subject.
        """
        known_seq = self._last_seq
        async with aclosing(self._log.history([self._subjects.sealed], self._last_seq + 1)) as records:
            async for record in records:
                if not _is_foreign(record):
                    return False
                self._last_seq = record.seq
        if self._last_seq == known_seq:
            last = await self._log.last(self._subjects.sealed)
            self._last_seq = last.seq if last is not None else 0
        return self._last_seq != known_seq

    # ---- continuing a chain ------------------------------------------------------------------------
    async def _continued(self, identity: LogIdentity, view: View) -> Segment:
        """Return the segment after the last seal; in a log without seals, the first one."""
        last = await self._last_seal()
        if self._anchoring is not None:
            self._anchoring.check(identity, last)
        if last is None:
            first_seq = 1 if view.epoch == 1 else view.epoch_seq
            return Segment(identity, self._subjects, first_seq, sealed_since=first_seq)
        if last.key not in self._trusted:
            _LOGGER.warning(
                "the last seal of the log is by key %s: if it is another conductor's or an earlier one, add "
                "it to sealing.trusted_keys",
                fingerprint(last.key),
            )
        segment = Segment.after(last.seal, identity, self._subjects)
        await self._recall(segment, last.seal)
        return segment

    async def _last_seal(self) -> SignedSeal | None:
        """Return the last readable seal, and note the last record on its subject."""
        record = await self._log.last(self._subjects.sealed)
        self._last_seq = record.seq if record is not None else 0
        if record is None:
            return None
        with contextlib.suppress(BadSealError):
            return seals.read(record)
        _LOGGER.warning("record %d, the last on the subject of seals, is not a valid seal", record.seq)
        return await self._last_readable()

    async def _last_readable(self) -> SignedSeal | None:
        found = None
        async with aclosing(self._log.history([self._subjects.sealed])) as records:
            async for record in records:
                with contextlib.suppress(BadSealError):
                    found = seals.read(record)
        return found

    async def _recall(self, segment: Segment, last: Seal) -> None:
        """Read the records of requests again that no seal lists yet."""
        if last.open_since > last.last_seq:
            return
        listed: dict[str, int] = {}
        async with aclosing(self._log.history([self._subjects.sealed], last.open_since)) as records:
            async for record in records:
                listed |= _listed(record)
        history = self._log.history(self._subjects.logged(), last.open_since, last.last_seq)
        async with aclosing(history) as records:
            async for record in records:
                address = self._subjects.parse(record.subject)
                request_id = address.request_id if address is not None else None
                if request_id is not None and record.seq > listed.get(request_id, 0):
                    segment.recall(record)
                if record.seq % _YIELD_EVERY == 0:
                    await asyncio.sleep(0)


def _is_foreign(record: StoredRecord) -> bool:
    """Tell whether a record on the subject of seals is no seal at all."""
    try:
        seals.read(record)
    except BadSealError as error:
        return error.is_foreign
    return False


def _listed(record: StoredRecord) -> dict[str, int]:
    """Return the last record of each request that a seal lists."""
    with contextlib.suppress(BadSealError):
        return {entry.request_id: entry.last_seq for entry in seals.read(record).seal.requests}
    return {}
