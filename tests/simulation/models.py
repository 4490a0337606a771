"""The models of the simulator: each walk's work for a worker, and the output that clients expect.

    decoder    `decoder_lm`, the real graph and plan: prepare; prefill and decode
    speech     `tests.conductor.speech`: up to three partitions, with streams between them

The output is a function of the request, the position and the checkpoint that is loaded, as with a recorded
seed. So every attempt with one checkpoint produces the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from conductor.core.schedule import Deployment
from configs.placement import PlacedGroup, rank_of
from models import registry
from models.base import ModelGraph
from shared.events import NodeReady, WalkCompleted
from shared.walks import Fixed, StreamingEdge
from tests.conductor import script, speech

TOKENS: Final = speech.TOKENS
"""How many tokens an answer has."""


SPEAKING: Final = frozenset({"talk", "listen"})
WHOLE: Final = Fixed(1)
"""Every item by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The work of one walk on its rank.

    Attributes:
        node: the node that runs it.
        does: `do` something at once, `fill` a sequence that the next walk decodes, `talk`, or `listen`.
        track: the output track.
        stream: the stream that it consumes, cut into chunks by `cut`.
        makes: tensors that outlive the step.
        kinds: the request kinds that include it; empty for all.
    """

    node: str
    does: Literal["do", "fill", "talk", "listen"] = "do"
    track: str = ""
    stream: str = ""
    cut: Fixed = WHOLE
    makes: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model, as workers and clients know it.

    Attributes:
        kinds: the possible kinds of requests.
        streams: by stream, the walk that consumes it.
        report: the report of a healthy rank for its part of an order.
        tokens: the tracks of tokens, and how each is written; the others are media.
    """

    graph_of: Callable[[str], ModelGraph]
    family: str
    kinds: tuple[str, ...]
    parts: dict[str, Part]
    streams: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, str]
    report: Callable[..., WalkCompleted]

    def rank_of(self, order: NodeReady, walk: str) -> int:
        """The rank that runs a walk of an order."""
        return rank_of(order.placement, order.walk_placement, walk, self.parts[walk].node)

    def walks_of(self, kind: str) -> list[str]:
        """The walks of a request."""
        return [name for name, part in self.parts.items() if not part.kinds or kind in part.kinds]

    def streams_of(self, kind: str) -> list[str]:
        """The streams of a request."""
        walks = self.walks_of(kind)
        return [stream for stream, walk in self.streams.items() if walk in walks]

    def expected(self, request_id: str, kind: str, checkpoint: int) -> dict[str, str]:
        """The expected output of a checkpoint, by track."""
        speakers = [part for name in self.walks_of(kind) if (part := self.parts[name]).does in SPEAKING]
        return {part.track: self.said(part.track, request_id, 0, TOKENS, checkpoint) for part in speakers}

    def said(self, track: str, request_id: str, start: int, stop: int, checkpoint: int) -> str:
        """The output of a track for these items."""
        form = self.tokens.get(track, "~{}~")
        return "".join(form.format(token(request_id, item, checkpoint)) for item in range(start, stop))


def token(request_id: str, index: int, checkpoint: int) -> int:
    """The token at a position."""
    return sum(request_id.encode()) * 31 + index * 7 + checkpoint * 1_000_000


def _cut(edge: StreamingEdge) -> Fixed:
    assert isinstance(edge.chunks, Fixed)
    return edge.chunks


def _decoded(order: NodeReady, **changes: Any) -> WalkCompleted:
    return msgspec.structs.replace(script.completion(order), **changes)


DECODER: Final = Model(
    graph_of=registry.graph,
    family="decoder_lm",
    kinds=("chat",),
    parts={
        "prepare": Part(node="prepare"),
        "prefill": Part(node="llm", does="fill"),
        "decode": Part(node="llm", does="talk"),
    },
    tokens={"": "<{}>"},
    report=_decoded,
)
SPEECH: Final = Model(
    graph_of=speech.graph_of,
    family="speech",
    kinds=("solo", "duet", "trio"),
    parts={
        "prepare": Part(node="prepare", makes=("ids",)),
        "prefill": Part(node="talker", does="fill"),
        "decode": Part(node="talker", does="talk", track="talker", makes=("state",)),
        "go_on": Part(node="talker", does="talk", track="talker", makes=("state",), kinds=("duet", "trio")),
        "render": Part(
            node="vocoder",
            does="listen",
            track="vocoder",
            stream="codes",
            cut=_cut(speech.CODES),
            makes=("sound",),
            kinds=("duet", "trio"),
        ),
        "caption": Part(
            node="captioner",
            does="listen",
            track="captioner",
            stream="words",
            cut=_cut(speech.WORDS),
            kinds=("trio",),
        ),
        "master": Part(node="vocoder", makes=("mastered",), kinds=("duet", "trio")),
        "sign": Part(node="captioner"),
    },
    streams={"codes": "render", "words": "caption"},
    tokens={"talker": "<{}>", "captioner": "[{}]"},
    report=speech.part,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A model on its ranks."""

    model: Model
    groups: tuple[PlacedGroup, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for group in self.groups for rank in group.ranks}))

    def deployment(self, **changes: Any) -> Deployment:
        """The deployment, as the conductor knows it."""
        made = speech.deployment if self.model is SPEECH else script.deployment
        return msgspec.structs.replace(made(), groups=self.groups, **changes)


LAYOUTS: Final[dict[str, Layout]] = {
    "decoder": Layout(model=DECODER, groups=(speech.group("prepare llm", 0),)),
    "decoder x3": Layout(model=DECODER, groups=(speech.group("prepare llm", 0, 1, 2),)),
    "decoder apart": Layout(
        model=DECODER,
        groups=(
            speech.group("prepare", 0),
            speech.group("llm", 0, 1, walks="prefill"),
            speech.group("llm", 2, 3, walks="decode"),
        ),
    ),
    **{name: Layout(model=SPEECH, groups=groups) for name, groups in speech.LAYOUTS.items()},
}
