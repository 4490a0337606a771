"""The newest requests of a log that a filter chooses."""

from contextlib import aclosing
from itertools import islice

from dalsegno.history.prompts import with_prompt
from dalsegno.history.request_filter import RequestFilter
from dalsegno.history.request_index import Requests
from dalsegno.history.summary import Summary
from shared.log.port import Log
from shared.subjects import Subjects


async def newest(
    log: Log, subjects: Subjects, requests: Requests, wanted: RequestFilter, limit: int, *, now_ns: int
) -> list[Summary]:
    """Return at most `limit` requests that a filter chooses, oldest first.

    Args:
        log: the log of the requests, whose prompts are read if the filter needs them.
        subjects: its subjects.
        requests: its requests.
        wanted: the filter.
        limit: at least 1.
        now_ns: the time until which running requests have been running.
    """
    range_ = requests.newest(wanted.since_ns, wanted.until_ns)
    candidates = (summary for summary in range_ if wanted.accepts(summary, now_ns))
    if not wanted.reads_prompts:
        return list(islice(candidates, limit))[::-1]
    found: list[Summary] = []
    async with aclosing(with_prompt(log, subjects, candidates, wanted.accepts_prompt)) as matching:
        async for summary in matching:
            found.append(summary)
            if len(found) == limit:
                break
    return found[::-1]
