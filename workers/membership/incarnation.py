"""The life cycle that every worker process has on the log, whether it runs orders or follows a leader.

The process works until it is cancelled; then it is asked to stop, and ends as soon as it can. Meanwhile it
repeats its `worker.joined`, because the log expires records. It ends for good when a newer process takes the
rank.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, Never

from shared.errors import WorkerError
from shared.events import WorkerJoined
from shared.ids import Rank
from shared.subjects import Subjects
from workers.membership.event_writer import EventWriter

FINAL_EVENTS_S: Final = 2.0
"""The time that a leaving process waits for its last events to be stored."""
REPEAT_JOIN_S: Final = 24 * 3600.0
"""The period of the repeated `worker.joined`. The log keeps events for days; a worker may run for longer."""


class SupersededError(WorkerError):
    """Another process has taken this rank.

    If a supervisor restarts this process, it takes the rank back. A process that a person started is not
    restarted.
    """

    code = "superseded"

    def __init__(self, rank: Rank, incarnation: int, own: int | None) -> None:
        super().__init__(
            f"rank {rank} has joined again as incarnation {incarnation}, in another process; "
            f"this one ({own}) ends"
        )


async def until_cancelled(work: Callable[[asyncio.Event], Coroutine[Any, Any, None]], name: str) -> None:
    """Run `work` to its end. On cancellation, set the event that `work` received, and wait for its end."""
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


async def repeat_join(
    joined: WorkerJoined, writer: EventWriter, subjects: Subjects, incarnation: Callable[[], int | None]
) -> Never:
    """Post `joined` again before the log expires it. The copy names the incarnation it belongs to."""
    while True:
        await asyncio.sleep(REPEAT_JOIN_S)
        if incarnation() is not None:
            await writer.post_when_possible(subjects.worker(joined.rank), joined)
