"""A rank's life on the log, as each of its processes has it: one that runs orders, and one that follows.

It works until it is cancelled, and is told to end then, which it does in its own time. Meanwhile it says
again who is here, for the log forgets; and it ends for good when a newer process has the rank.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, Never

from shared.errors import WorkerError
from shared.events import WorkerJoined
from shared.ids import Rank
from shared.subjects import Subjects
from workers.membership.event_writer import EventWriter

LAST_WORDS_S: Final = 2.0
"""So long a process that leaves waits until the log has what it said last."""
SAY_AGAIN_S: Final = 24 * 3600.0
"""The log keeps events for days; a worker may live longer, and others look for it there."""


class SupersededError(WorkerError):
    """Another process has taken this rank.

    Started again by its supervisor, this one takes the rank back; one that a person started is not.
    """

    code = "superseded"

    def __init__(self, rank: Rank, incarnation: int, own: int | None) -> None:
        super().__init__(
            f"rank {rank} has joined again as incarnation {incarnation}, in another process; "
            f"this one ({own}) ends"
        )


async def until_cancelled(work: Callable[[asyncio.Event], Coroutine[Any, Any, None]], name: str) -> None:
    """Run `work` to its end; where that is cancelled, set the event it was given and wait for its end."""
    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(work(stopping), name=name)
        try:
            await asyncio.wait([working])
        except asyncio.CancelledError:
            if not working.done():
                stopping.set()
                await asyncio.wait([working])
            raise


async def stay_known(
    joined: WorkerJoined, writer: EventWriter, subjects: Subjects, incarnation: Callable[[], int | None]
) -> Never:
    """Say again who is here, before the log forgets it: a copy, which names the life it is of."""
    while True:
        await asyncio.sleep(SAY_AGAIN_S)
        if incarnation() is not None:
            await writer.post_when_possible(subjects.worker(joined.rank), joined)
