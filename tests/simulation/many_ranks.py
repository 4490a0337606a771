"""The simulation of a model on several ranks (`tests.conductor.speech`), with up to three partitions.

Real are, beside what is real in `tests.simulation.simulator`, the edges: rows and streams go from rank to
rank over the log and its accidents, and through the inboxes. A tensor is where its owner's life is: whoever
needs it later finds it gone, and now and then one is gone for no reason that anybody knows.

Beyond the simulator's accidents any rank may die, or leave and come back after a while.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import msgspec

from conductor.core.schedule import Deployment
from shared.events import (
    Event,
    Failure,
    NodeFired,
    NodeReady,
    OutputChunk,
    OutputFence,
    RowState,
    StreamSent,
    StreamTotals,
    WalkFailed,
    WorkerLeaving,
    encode,
)
from shared.log.port import StoredRecord
from shared.placement import rank_of
from shared.tensors import Handle
from shared.transcript import Transcript
from shared.walks import chunks_of
from tests.conductor import speech
from tests.conductor.script import SUBJECTS
from tests.simulation.simulator import Plan, RankProcess, Simulation, token
from workers.early import Heard
from workers.inbox import Ended, Joined, Start, StepKey, Stop, Superseded

KINDS: Final = ("solo", "duet", "trio")
FORMS: Final = {"talker": "<{}>", "vocoder": "({})", "captioner": "[{}]"}
"""How each track writes one item."""
LISTENERS: Final = {
    "codes": ("render", "vocoder", speech.CODES),
    "words": ("caption", "captioner", speech.WORDS),
}
HEARD: Final = {"render": "codes", "caption": "words"}


def said_by(track: str, request_id: str, start: int, stop: int) -> str:
    """What a track says of these items."""
    return "".join(FORMS[track].format(token(request_id, item)) for item in range(start, stop))


def plan_of(seed: int) -> Plan:
    """A plan for a seed: quiet and wild ones, in every layout."""
    chance = random.Random(f"ranks {seed}")
    return replace(
        Plan.of(seed),
        layout=chance.choice(sorted(speech.LAYOUTS)),
        requests=chance.randint(1, 4),
        max_attempts=chance.choice([2, 200, 200, 200]),
        p_crash=chance.choice([0.0, 0.02, 0.06]),
        p_leave=chance.choice([0.0, 0.5]),
        p_gone=chance.choice([0.0, 0.1, 0.4]),
    )


@dataclass(slots=True)
class Part:
    """A rank's part of an order it is at. `said` is None until the fence of its attempt was read."""

    order: NodeReady
    is_checked: bool = False
    row_sent: bool = False
    row_read: bool = False
    transcript: Transcript = field(default_factory=Transcript)
    said: int | None = None
    sent: int = 0
    unacked: int = 0


@dataclass(slots=True)
class Items:
    """What was heard of a stream in one attempt."""

    numbers: set[int] = field(default_factory=set)
    total: int | None = None

    def take(self, sent: StreamSent) -> None:
        count = sent.items.shape[0] if sent.items is not None else 0
        self.numbers |= set(range(sent.index, sent.index + count))
        if sent.end:
            self.total = sent.index + count

    @property
    def there(self) -> int:
        """How many there are without a hole."""
        return next(number for number in range(len(self.numbers) + 1) if number not in self.numbers)


class SpeechWorker(RankProcess):
    """One life of one of the ranks."""

    sim: "ManyRanks"

    def __init__(self, sim: "Simulation", name: str, rank: int = 0) -> None:
        super().__init__(sim, name, rank)
        self.parts: dict[StepKey, Part] = {}
        self.items: defaultdict[tuple[str, int, str], Items] = defaultdict(Items)
        self.rows: dict[StepKey, Handle] = {}

    @property
    def busy(self) -> bool:
        return bool(self.parts)

    def wants(self, record: StoredRecord) -> bool:
        address = SUBJECTS.parse(record.subject)
        if address is None:
            return False
        if address.kind == "ready":
            return address.rank == self.rank
        if address.kind == "edge":
            return address.to_rank == self.rank
        return address.kind in {"walk", "worker", "conductor"}

    def take(self, record: StoredRecord) -> None:
        match self.inbox.fold(record):
            case Start(key, order, heard, refused):
                assert not refused, refused
                self.sim.started[key, self.rank] += 1
                self.drop(key.request_id, below=key.attempt)
                self.parts[key] = Part(order)
                for edge in heard:
                    self.hear(edge.event)
            case Stop(key, order):
                if self.parts.pop(key, None):
                    self.report_stop(order)
            case Heard(event):
                self.hear(event)
            case Ended(request_id):
                self.drop(request_id)
            case Superseded():
                self.alive = False
            case Joined() | _:
                pass

    def drop(self, request_id: str, below: int = 1_000_000) -> None:
        for key in [k for k in self.parts if k.request_id == request_id and k.attempt < below]:
            del self.parts[key]

    def hear(self, event: Event) -> None:
        request_id = str(event.request_id)
        match event:
            case NodeFired():
                assert event.row is not None
                self.rows[StepKey(request_id, event.attempt, event.index)] = event.row.kv
            case StreamSent():
                self.items[request_id, event.attempt, event.stream].take(event)
            case _:
                raise AssertionError(event)

    # ---- a part of an order ------------------------------------------------------------------------
    def work(self) -> bool:
        keys = sorted(self.parts)
        return any(self.step(key, self.parts[key]) for key in self.sim.random.sample(keys, len(keys)))

    def step(self, key: StepKey, part: Part) -> bool:
        """Go one step on, if that is possible."""
        name = part.order.walks[0].name
        if not part.is_checked:
            part.is_checked = True
            inputs = [h for walk in part.order.walks for h in walk.inputs.values()]
            if self.runs(part.order, name) and self.misses(key, part, inputs):
                return True
        if name in {"prefill", "go_on"}:
            return self.talk(key, part)
        if name in HEARD:
            return self.listen(key, part, HEARD[name])
        self.finish(key, part)
        return True

    def runs(self, order: NodeReady, walk: str) -> bool:
        (node,) = speech.GRAPH.walks[walk].nodes
        return rank_of(order.placement, order.walk_placement, walk, node) == self.rank

    def misses(self, key: StepKey, part: Part, handles: list[Handle]) -> bool:
        """Whether a tensor is gone; then that is reported."""
        missing = next((handle for handle in handles if not self.sim.holds(handle)), None)
        if missing is None:
            return False
        order = part.order
        failed = WalkFailed(
            id=f"{order.id}.failed",
            **self.about(order),
            index=order.index,
            rank=self.rank,
            failure=Failure(code="tensor_gone", message=f"{missing.key} is gone"),
            gone=missing.key,
        )
        self.post(SUBJECTS.done(self.rank, key.request_id), failed)
        del self.parts[key]
        return True

    def talk(self, key: StepKey, part: Part) -> bool:
        order, walk = part.order, part.order.walks[-1]
        if not self.runs(order, walk.name):
            return self.hand_on(key, part)
        if not self.runs(order, order.walks[0].name) and not part.row_read:
            if key not in self.rows:
                return False
            part.row_read = True
            if self.misses(key, part, [self.rows[key]]):
                return True
        if part.said is None:
            part.sent = walk.args["first"]
            return self.resume(part, "talker")
        stop = walk.args["first"] + walk.args["max_tokens"]
        to_say = part.said < stop
        if part.sent < stop and (not to_say or self.sim.random.random() < 0.5):
            self.send(part, stop)
        elif to_say:
            self.say(part, "talker", stop)
        elif part.unacked:
            return False
        else:
            self.finish(key, part, "talker")
        return True

    def hand_on(self, key: StepKey, part: Part) -> bool:
        """Send the row to where it goes on."""
        order = part.order
        if part.row_sent:
            if part.unacked:
                return False
            self.finish(key, part)
            return True
        part.row_sent = True
        to = rank_of(order.placement, order.walk_placement, "decode", "talker")
        row = RowState(kv=speech.handle_of(order, "prefill", "talker", "kv"), token_ids=[])
        fired = NodeFired(
            id=f"{order.id}.fired",
            **self.about(order),
            index=order.index,
            walk=0,
            node="talker",
            path=(),
            row=row,
        )
        self.post_counted(part, SUBJECTS.edge(to, self.rank, key.request_id), fired)
        return True

    def send(self, part: Part, stop: int) -> None:
        """Send the next items to all who listen; the end with the last of them, or behind it."""
        order, start = part.order, part.sent
        part.sent = min(stop, start + self.sim.random.randint(1, 3))
        kind = self.sim.asked(str(order.request_id))
        for stream in list(LISTENERS)[: KINDS.index(kind)]:
            walk, node, _ = LISTENERS[stream]
            to = rank_of(order.placement, order.walk_placement, walk, node)
            items = Handle(
                key=speech.key_of(order, "decode", "talker", f"{stream}.{start}"),
                dtype="int32",
                shape=(part.sent - start,),
                data=b"",
            )
            is_last = part.sent == stop and stream in order.ends
            is_apart = is_last and self.sim.random.random() < 0.5
            sent = StreamSent(
                id=f"{order.id}.{stream}.{start}",
                **self.about(order),
                index=start,
                stream=stream,
                to=node,
                items=items,
                end=is_last and not is_apart,
            )
            self.tell(part, to, sent)
            if is_apart:
                end = {"id": f"{order.id}.{stream}.end", "index": part.sent, "items": None, "end": True}
                self.tell(part, to, msgspec.structs.replace(sent, **end))

    def tell(self, part: Part, to: int, sent: StreamSent) -> None:
        if to == self.rank:
            self.hear(sent)
        else:
            self.post_counted(part, SUBJECTS.edge(to, self.rank, str(sent.request_id)), sent)

    def listen(self, key: StepKey, part: Part, stream: str) -> bool:
        _, track, edge = LISTENERS[stream]
        if part.said is None:
            return self.resume(part, track)
        items = self.items[key.request_id, key.attempt, stream]
        if part.said < items.there:
            self.say(part, track, items.there)
        elif items.there == items.total and not part.unacked:
            totals = StreamTotals(items=items.there, chunks=chunks_of(edge.chunks, items.there))
            self.finish(key, part, track, streams={stream: totals})
        else:
            return False
        return True

    # ---- what it puts out --------------------------------------------------------------------------
    def resume(self, part: Part, track: str) -> bool:
        """Fold what is valid of the output; whether the fence of this attempt is there yet."""
        order, said, transcript = part.order, 0, Transcript()
        for event in self.sim.outputs(str(order.request_id)):
            if isinstance(event, OutputFence) and event.attempt > order.attempt:
                break  # all this attempt says from here on is void, and it has not heard of that yet
            said += sum(len(chunk.token_ids) for chunk in transcript.fold(event) if chunk.track == track)
        if transcript.attempt < order.attempt and order.attempt > 1:
            return False
        part.transcript, part.said = transcript, said
        return True

    def say(self, part: Part, track: str, most: int) -> None:
        order, said = part.order, part.said
        assert said is not None
        request_id, index = str(order.request_id), part.transcript.track(track).next_index
        stop = min(most, said + self.sim.random.randint(1, 3))
        chunk = OutputChunk(
            id=f"{request_id}.chunk.{order.attempt}.{track}.{index}.{order.incarnation}",
            **self.about(order),
            index=index,
            track=track,
            text=said_by(track, request_id, said, stop),
            text_offset=len(said_by(track, request_id, 0, said)),
            token_ids=[token(request_id, item) for item in range(said, stop)],
            token_offset=said,
        )
        assert part.transcript.fold(chunk) == [chunk]
        part.said = stop
        self.post_counted(part, SUBJECTS.output(order.origin, request_id, f"w{self.rank}"), chunk)

    def finish(self, key: StepKey, part: Part, track: str | None = None, **changes: Any) -> None:
        if track is not None:
            changes["tracks"] = {track: part.transcript.track(track).totals}
        self.post(SUBJECTS.done(self.rank, key.request_id), speech.part(part.order, **changes))
        del self.parts[key]

    def post_counted(self, part: Part, subject: str, event: Event) -> None:
        def stored() -> None:
            part.unacked -= 1

        part.unacked += 1
        self.post(subject, event, stored)

    def about(self, order: NodeReady) -> dict[str, Any]:
        return {
            "writer": f"w{self.rank}",
            "request_id": order.request_id,
            "attempt": order.attempt,
            "incarnation": order.incarnation,
        }


class ManyRanks(Simulation):
    """One history of the speech model."""

    flag: ClassVar[str] = "--many-ranks"
    ranks: ClassVar[tuple[int, ...]] = (0, 1, 2)
    worker: ClassVar[type[RankProcess]] = SpeechWorker
    graph_of = staticmethod(speech.graph_of)

    def __init__(
        self, seed: int, plan: Plan | None = None, records: list[StoredRecord] | None = None
    ) -> None:
        super().__init__(seed, plan or plan_of(seed), records)

    def serve(self) -> Deployment:
        return speech.deployment(self.plan.layout)

    def asked(self, request_id: str) -> str:
        return KINDS[(self.seed + int(request_id[1:])) % len(KINDS)]

    def texts(self, request_id: str) -> dict[str, str]:
        tracks = list(FORMS)[: 1 + KINDS.index(self.asked(request_id))]
        return {track: said_by(track, request_id, 0, speech.TOKENS) for track in tracks}

    def holds(self, handle: Handle) -> bool:
        """Whether a tensor's owner still lives, and has it."""
        if self.faulty and self.random.random() < self.plan.p_gone:
            return False
        return any(
            worker.alive and worker.inbox.incarnation == handle.incarnation
            for worker in self.workers
            if worker.rank == handle.rank
        )

    def crash(self) -> None:
        """A rank is lost more often than not: that is what there are several of."""
        if self.random.random() < 0.6:
            self.lose_rank(self.random.choice(self.ranks))
        else:
            super().crash()

    def lose_rank(self, rank: int) -> None:
        worker = self.present(rank)
        if worker is None or worker.inbox.incarnation is None or self.random.random() >= self.plan.p_leave:
            super().lose_rank(rank)
            return
        worker.alive = False
        leaving = WorkerLeaving(
            id=f"{worker.name}.leaving",
            writer=f"w{rank}",
            rank=rank,
            incarnation=worker.inbox.incarnation,
        )
        self.store(SUBJECTS.worker(rank), encode(leaving))
        self.story.append(f"{self.steps}: rank {rank} leaves")

    def step(self) -> bool:
        if self.faulty and self.random.random() < 0.03:
            self.heal()
        return super().step()
