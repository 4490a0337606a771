"""A log of requests as a worker with known costs served them: the truth that `times` has to find."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec

from conductor.core.cluster import Cluster
from conductor.core.schedule import Deployment
from dalsegno.what_if.cost_model import StepCost
from dalsegno.what_if.engines import EngineSize, SimulatedEngine
from dalsegno.what_if.recorded_load import Tokens
from dalsegno.what_if.timeline import Timeline
from shared.events import NodeReady, NodeWork, Params, WalkResult, decode
from shared.log.port import StoredRecord
from shared.tensors import inline_ids
from tests.conductor.script import SUBJECTS, Script, completion
from workers.settings import EngineSettings
from workers.threads.engine_work import EngineWork

COST: Final = StepCost(step_s=0.010, row_s=0.002, token_s=0.0005)
PREPARE_S: Final = 0.004
_BEGIN_NS: Final = 1_700_000_000_000_000_000


class Asks(msgspec.Struct, frozen=True):
    """A request: when it comes, the length of its prompt and of its answer."""

    at_s: float
    prompt: int
    generated: int


def traffic(count: int, seed: int = 1, per_s: float = 4.0) -> list[Asks]:
    """Requests that come at random."""
    draw, at_s, found = random.Random(seed), 0.1, list[Asks]()
    for _ in range(count):
        at_s += draw.expovariate(per_s)
        found.append(Asks(at_s, draw.choice([5, 20, 60]), draw.randint(10, 60)))
    return found


class Served(Script):
    """The log, with one worker whose engine has the costs of `COST`."""

    def __init__(
        self,
        asks: Sequence[Asks],
        deployment: Deployment,
        engine: EngineSettings,
        *,
        cost: StepCost = COST,
        has_work: bool = True,
        kv_tokens: int = 2048,
    ) -> None:
        super().__init__(serve=deployment)
        self.timeline = Timeline()
        self._asks = asks
        self._has_work = has_work
        self._taken = 0
        self._work: dict[str, EngineWork] = {}
        size = EngineSize(settings=engine, device="cpu", kv_tokens=kv_tokens, max_positions=512)
        self.engine = SimulatedEngine(self.timeline, size, cost)
        self.open_epoch()
        self.join(kv_tokens=kv_tokens)
        for number, one in enumerate(asks):
            params = Params(max_tokens=one.generated, ignore_eos=True)
            self.timeline.at(one.at_s, partial(self.submit, f"r{number}", params=params))
        self.timeline.run()

    @property
    def latencies(self) -> list[float]:
        """The time of each finished request, in seconds."""
        cluster, begun, found = Cluster(self.cluster.graph_of, SUBJECTS), dict[str, int](), list[float]()
        for record in self.records:
            waiting = set(cluster.open)
            cluster.fold(record)
            begun |= dict.fromkeys(set(cluster.open) - waiting, record.time_ns)
            found += [(record.time_ns - begun[name]) / 1e9 for name in waiting - set(cluster.open)]
        return found

    def store(self, subject: str, data: bytes) -> int:
        seq = super().store(subject, data)
        now_ns = _BEGIN_NS + round(self.timeline.now_s * 1e9) + seq
        self.records[-1] = StoredRecord(seq, subject, data, time_ns=now_ns)
        return seq

    def settle(self) -> None:
        super().settle()
        new, self._taken = self.records[self._taken :], len(self.records)
        for record in new:
            if record.subject.startswith(f"{SUBJECTS.prefix}.ready."):
                order = decode(record.data)
                assert isinstance(order, NodeReady)
                self._execute(order)

    def _execute(self, order: NodeReady) -> None:
        ask = self._asks[int(str(order.request_id)[1:])]
        begun_s = self.timeline.now_s
        if order.walks[0].name == "prepare":
            self.timeline.after(PREPARE_S, partial(self._prepared, order, ask))
            return
        first: list[float] = []
        self.engine.add(
            str(order.request_id),
            Tokens(prompt=_ids(order, ask), generated=ask.generated),
            on_first=lambda: first.append(self.timeline.now_s - begun_s),
            on_end=lambda: self._generated(order, ask, begun_s, first[0]),
        )
        self._work[str(order.request_id)] = next(reversed(self.engine._served)).work

    def _prepared(self, order: NodeReady, ask: Asks) -> None:
        name = f"{order.request_id}/token_ids"
        facts = {"prompt_tokens": ask.prompt, "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0}}
        result = WalkResult(
            name="prepare", facts=facts, outputs={"token_ids": inline_ids(name, _ids(order, ask))}
        )
        self._complete(order, [result], {"prepare": NodeWork(calls=1, took_s=PREPARE_S)})

    def _generated(self, order: NodeReady, ask: Asks, begun_s: float, first_s: float) -> None:
        steps, rows = self._work[str(order.request_id)].so_far
        took = NodeWork(
            calls=2,
            took_s=self.timeline.now_s - begun_s,
            first_token_s=first_s,
            steps=steps,
            rows=rows / steps,
        )
        facts = {"completion_tokens": ask.generated, "finish_reason": "length"}
        results = [WalkResult(name="prefill"), WalkResult(name="decode", facts=facts)]
        self._complete(order, results, {"llm": took})

    def _complete(self, order: NodeReady, results: list[WalkResult], work: dict[str, NodeWork]) -> None:
        changes: dict[str, Any] = {"results": results, "work": work if self._has_work else {}}
        self.say(
            SUBJECTS.done(order.rank, str(order.request_id)),
            msgspec.structs.replace(completion(order), **changes),
        )


def _ids(order: NodeReady, ask: Asks) -> list[int]:
    """The prompt of a request, which no other one begins like."""
    return [1000 + int(str(order.request_id)[1:]), *range(ask.prompt - 1)]
