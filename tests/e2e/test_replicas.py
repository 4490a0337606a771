"""Two replicas: requests go where their prefix is cached, and no rank exceeds its request limit."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any, Final

import pytest
import yaml

from shared.events import RequestAdmitted, RequestFinished, decode
from tests.e2e import clients, deploy
from tests.e2e.deploy import Running
from tests.tiny import tiny_checkpoint

pytestmark = pytest.mark.timeout(200)  # four processes start
RANKS: Final = (0, 1)
BLOCK: Final = 16
BEGINNING: Final = list(range(100, 200))
"""Of 100 tokens: 6 whole blocks; and as JSON 401 bytes, so one piece of 256 and a part of another."""
PER_REPLICA: Final = 2
IN_ALL: Final = 3


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("replicas")
    file = folder / "replicas.yaml"
    told = {
        "model": "decoder_lm",
        "checkpoint": str(tiny_checkpoint("qwen3")),
        "max_seq_len": 512,
        "max_concurrent_requests": IN_ALL,
        "node_groups": [{"node_names": ["prepare", "llm"], "ranks": list(RANKS)}],
        "scheduling": {"replicas": "cache_aware", "max_in_flight_per_replica": PER_REPLICA},
        "model_kwargs": {"device": "cpu", "dtype": "float32", "block_size": BLOCK},
    }
    file.write_text(yaml.safe_dump(told))
    with deploy.serve(folder, model=str(file)) as running:
        yield running


def asked(request_id: str, token_ids: list[int], **params: Any) -> dict[str, Any]:
    body = {"token_ids": token_ids, "request_id": request_id, "streaming": False}
    return body | {"model_kwargs": {"temperature": 0, "ignore_eos": True, **params}}


async def admitted(reader: clients.Reader, request_id: str) -> RequestAdmitted:
    _, event = await reader.until(reader.subjects.walk(request_id), RequestAdmitted)
    return event


async def not_computed(reader: clients.Reader, rank: int, *, of: int) -> int:
    """The cached prompt tokens of a rank, once it has admitted so many."""
    beats = reader.subjects.heartbeat("worker", str(rank))
    beat = await reader.said(beats, lambda beat: beat["meters"]["prefix"]["asked"] >= of)
    assert beat["meters"]["prefix"]["asked"] == of
    found: int = beat["meters"]["prefix"]["hit"]
    return found


async def test_a_request_goes_to_the_replica_that_was_warmed_and_computes_its_own_part_alone(
    replicas: Running,
) -> None:
    unlike, like = list(range(300, 400)), [*BEGINNING, 7, 8, 9]
    async with clients.http(replicas) as http, clients.reader(replicas) as reader:
        await http.post("/generate", json=asked("unlike", unlike, max_tokens=1))
        kept = (await http.post("/warm", json={"token_ids": BEGINNING, "request_id": "warm"})).json()
        await http.post("/generate", json=asked("like", like, max_tokens=1))
        await http.post("/generate", json=asked("again", unlike, max_tokens=1))
        events = {name: await admitted(reader, name) for name in ("unlike", "warm", "like", "again")}
        warmed, other = events["warm"].placement["llm"], events["unlike"].placement["llm"]
        hits = await not_computed(reader, warmed, of=len(BEGINNING) + len(like))
        hits_there = await not_computed(reader, other, of=2 * len(unlike))

    assert warmed != other  # when they came nobody had either: one after the other
    assert events["like"].placement["llm"] == warmed
    assert "its cache has 1 of 2 pieces of the prompt" in events["like"].reason
    assert events["again"].placement["llm"] == other
    assert kept["cached_tokens"] == hits == hits_there == len(BEGINNING) // BLOCK * BLOCK == 96


async def test_no_replica_has_more_requests_than_it_may_nor_all_of_them_together(replicas: Running) -> None:
    """The requests share a prefix, so one replica would get them all; there are twice as many as may run."""
    names = [f"at-once-{number}" for number in range(2 * IN_ALL)]
    async with clients.http(replicas) as http, clients.reader(replicas) as reader:
        bodies = [asked(name, [*BEGINNING, place + 7], max_tokens=60) for place, name in enumerate(names)]
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(http.post("/generate", json=body)) for body in bodies]
        most: Counter[int | str] = Counter()
        here: Counter[int | str] = Counter()
        ranks: dict[str, int] = {}
        async with aclosing(reader.log.history([reader.subjects.walk("*")])) as records:
            async for record in records:
                event = decode(record.data)
                name = str(event.request_id)
                if name not in names:
                    continue
                if isinstance(event, RequestAdmitted):
                    ranks[name] = event.placement["llm"]
                    here.update([ranks[name], "all"])
                elif isinstance(event, RequestFinished):
                    here.subtract([ranks[name], "all"])
                most |= here

    assert [answer.result().status_code for answer in asking] == [200] * len(names)
    assert here.total() == 0
    assert most["all"] == IN_ALL
    first = Counter([*ranks.values()][:IN_ALL])
    assert sorted(first.values()) == [IN_ALL - PER_REPLICA, PER_REPLICA]
    assert max(most[rank] for rank in RANKS) == PER_REPLICA
