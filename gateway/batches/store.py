"""The batches on the log. It is the only store, so every gateway answers the same.

A batch belongs to the API key that asked for it: for other keys it does not exist.
"""

from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from gateway.batches.state import BatchState, fold_records
from gateway.requests.second_log import SecondLog
from gateway.requests.service import Gateway
from gateway.requests.status import log_timeout
from shared.errors import ClientError
from shared.events import BatchCancelled, BatchCreated, encode
from shared.ids import is_token
from shared.log.port import WrongLastSequenceError

_ANY: Final = "*"


class NoBatchError(ClientError):
    """There is no such batch, or it is another tenant's."""

    code = "batch_not_found"
    status = 404
    param = "batch_id"

    def __init__(self, batch_id: str) -> None:
        super().__init__(
            f"there is no batch {batch_id[:80]!r} here: it was never asked for with this API key, or is "
            "older than the log"
        )


class BatchEndedError(ClientError):
    """A batch that cannot be cancelled."""

    code = "batch_has_ended"
    status = 409
    param = "batch_id"

    def __init__(self, state: BatchState) -> None:
        super().__init__(
            f"batch_id: expected a batch that has not ended, {state.id} is {state.status} already"
        )


@dataclass(frozen=True, slots=True)
class StoredBatches:
    """The batches of one tenant; None is that of a deployment without keys."""

    gateway: Gateway
    second: SecondLog
    tenant: str | None

    async def create(self, batch_id: str, event: BatchCreated) -> BatchState:
        """Store a new batch.

        Raises:
            CapacityError: the log is full, or does not answer.
        """
        async with log_timeout():
            await self.second.log.publish(
                self.gateway.subjects.batch(batch_id),
                encode(event),
                expected_last_seq=0,
                waits_while_full=False,
            )
        return await self.one(batch_id)

    async def one(self, batch_id: str) -> BatchState:
        """Return a batch.

        Raises:
            NoBatchError: there is none, or the log holds it no more.
            LogUnavailableError: the log does not answer.
        """
        states = await self._read(batch_id) if is_token(batch_id) else {}
        if batch_id not in states or not self._is_own(states[batch_id]):
            raise NoBatchError(batch_id)
        return states[batch_id]

    async def page(self, limit: int, after: str) -> tuple[list[BatchState], bool]:
        """Return up to `limit` batches behind that of the id `after`, the newest first; True: there are more.

        Raises:
            NoBatchError: there is no batch `after`.
            LogUnavailableError: the log does not answer.
        """
        states = [one for one in (await self._read(_ANY)).values() if self._is_own(one)]
        states.sort(key=lambda one: one.created_seq, reverse=True)
        if after:
            ids = [one.id for one in states]
            if after not in ids:
                raise NoBatchError(after)
            states = states[ids.index(after) + 1 :]
        return states[:limit], len(states) > limit

    async def cancel(self, batch_id: str) -> BatchState:
        """Cancel a batch; one that is being cancelled, or was, stays as it is.

        Raises:
            NoBatchError: there is no such batch.
            BatchEndedError: it has ended otherwise.
            LogUnavailableError: the log does not answer.
        """
        while True:
            state = await self.one(batch_id)
            if state.is_cancelled:
                return state
            if state.ended is not None:
                raise BatchEndedError(state)
            event = BatchCancelled(
                id=f"{self.gateway.origin}.{self.gateway.next_number()}", writer=self.gateway.origin
            )
            try:
                async with log_timeout():
                    await self.second.log.publish(
                        self.gateway.subjects.batch(batch_id),
                        encode(event),
                        expected_last_seq=state.last_seq,
                    )
            except WrongLastSequenceError:
                continue  # the batch went on meanwhile

    async def _read(self, batch_id: str) -> dict[str, BatchState]:
        states: dict[str, BatchState] = {}
        subjects = self.gateway.subjects
        async with (
            log_timeout(),
            aclosing(self.gateway.log.history([subjects.batch(batch_id)])) as records,
        ):
            async for record in records:
                fold_records(states, record, subjects)
        return states

    def _is_own(self, state: BatchState) -> bool:
        return state.created is not None and state.created.tenant == self.tenant
