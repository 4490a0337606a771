from pathlib import Path

from dalsegno.history.request_filter import RequestFilter
from dalsegno.history.request_index import opened_requests
from dalsegno.history.request_query import newest
from shared.events import Inputs
from shared.log.memory import MemoryLog, MemoryStore
from tests.conductor.script import SUBJECTS, Script


async def found(folder: Path | None, wanted: RequestFilter, limit: int) -> list[str]:
    script = Script()
    script.open_epoch()
    script.join()
    for number in range(30):
        script.submit(f"r{number}", inputs=Inputs(text=f"{'even' if number % 2 == 0 else 'odd'} number"))
        if number % 3:
            script.run_to_the_end(f"r{number}")
        else:
            script.cancel(f"r{number}")
    store = MemoryStore(SUBJECTS)
    for record in script.records:
        store.append(record.subject, record.data)
    log = MemoryLog(store)
    async with opened_requests(log, SUBJECTS, folder) as requests:
        chosen = await newest(log, SUBJECTS, requests, wanted, limit, now_ns=0)
    return [one.request_id for one in chosen]


async def test_the_limit_counts_chosen_requests_and_the_newest_come_last(tmp_path: Path) -> None:
    finished = RequestFilter(chosen={"outcome": frozenset({"finished"})})
    both = RequestFilter(chosen=finished.chosen, texts=("EVEN",))
    for folder in (tmp_path, None):
        assert await found(folder, RequestFilter(), 2) == ["r28", "r29"]
        assert await found(folder, finished, 3) == ["r26", "r28", "r29"]
        assert await found(folder, both, 3) == ["r22", "r26", "r28"]
        assert await found(folder, both, 1000) == [
            f"r{number}" for number in range(30) if number % 2 == 0 and number % 3
        ]
