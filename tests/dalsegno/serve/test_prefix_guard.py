import asyncio
import re

import msgspec
import pytest

from dalsegno.serve import prefix_guard
from dalsegno.serve.prefix_guard import PrefixInUseError
from shared.log.memory import MemoryLog, MemoryStore
from shared.subjects import Subjects

OURS, OTHER = Subjects("ours"), Subjects("other")


async def beating(log: MemoryLog, subject: str, beat: bytes) -> None:
    while True:
        await log.send_heartbeat(subject, beat)
        await asyncio.sleep(0)


async def listening(subject: str, beat: bytes) -> None:
    log = MemoryLog(MemoryStore(OURS))
    async with asyncio.TaskGroup() as tasks:
        heart = tasks.create_task(beating(log, subject, beat))
        try:
            await prefix_guard.refuse_running_deployment(log, OURS, "nats://127.0.0.1:4222", listen_s=0.05)
        finally:
            heart.cancel()


@pytest.mark.parametrize(
    ("beat", "who"),
    [(msgspec.msgpack.encode({"pid": 7}), "(worker 0, process 7)"), (b"\xc1", "(worker 0)")],
)
async def test_a_deployment_under_the_same_prefix_is_refused(beat: bytes, who: str) -> None:
    said = (
        f"running under the prefix 'ours' at nats://127.0.0.1:4222 {re.escape(who)}: .* another with --prefix"
    )
    with pytest.RaisesGroup(pytest.RaisesExc(PrefixInUseError, match=said)):
        await listening(OURS.heartbeat("worker", "0"), beat)


async def test_one_under_another_prefix_is_none_of_ours() -> None:
    await listening(OTHER.heartbeat("worker", "0"), b"\x80")
