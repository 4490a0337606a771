"""A model's three faces, as the planes see them.

    graph.py        pure: nodes, walks, plan                      read by the conductor (and by workers)
    processing.py   CPU nodes: chat template, tokenizer, media    run by workers, no torch
    nodes.py        torch modules                                 run by workers' engines

A family is a folder here, or a package that registers its folder under the entry point group
`dalsegno.models` (see `models.registry`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

from models.checkpoints.claims import CheckpointInfo, Claim
from shared.events import digest_of
from shared.plans import Plan, PlanRequest
from shared.tensors import Handle
from shared.walks import Client, CompiledWalk, InputPort, StreamInfo, streams

if TYPE_CHECKING:
    import torch


EMBEDDING: Final = "embedding"
"""The modality of a vector that stands for a text: float32, little-endian."""
HIDDEN_STATES: Final = "hidden_states"
"""The modality of a prompt's last hidden states, (tokens, hidden): float32, little-endian, in pieces."""
OF_PROMPTS: Final = frozenset({EMBEDDING, HIDDEN_STATES})
"""Modalities for which a prompt is computed and not answered."""


class EngineKind(StrEnum):
    """What runs a node: a CPU thread (`processing.py`), the KV-cache engine, the stateless engine."""

    CPU = "cpu"
    KV = "kv"
    STATELESS = "stateless"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGraph:
    """The pure face: which nodes there are, which walks lead over them, and which walk comes next.

    Attributes:
        family: the name of the folder.
        nodes: each node's engine.
        walks: compiled at load.
        plan: starts the plan of one request.
        modalities: what a client may send, e.g. `("text",)`; what it may get, the walks say (`outputs`).
        media: by modality, what a client needs to read a chunk's bytes (an audio's sample rate).
        repository: where its usual checkpoint is on the Hugging Face hub; empty where there is no usual one.
        former_walks: names that published placements use for walks there are no more; they place nothing.
        voices: who can speak, the first by default; none where nobody speaks.
        kwargs: keys of `model_kwargs` that are the family's own, beside the engine's; `nodes.load` gets them.
        paths: those of `kwargs` that are paths; in a file they are relative to it, and arrive absolute.
        embeds: a KV node makes an embedding of its prompt, or puts out its hidden states, where its walk is
            told how (`pooling`).
        claims: the claim to a checkpoint folder, for `dalsegno serve FOLDER`; None: the family is served by
            name only.
        serves: the checkpoints it claims, in words, for error messages.
        streams: what is between its walks, by the stream's name and the node that takes it; found in them.

    Raises:
        WalkError: a stream has no feeder, or no single consumer, or is fed by edges that differ.
    """

    family: str
    nodes: Mapping[str, EngineKind]
    walks: Mapping[str, CompiledWalk]
    plan: Callable[[PlanRequest], Plan]
    modalities: tuple[str, ...] = ("text",)
    media: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    repository: str = ""
    former_walks: frozenset[str] = frozenset()
    voices: tuple[str, ...] = ()
    kwargs: frozenset[str] = frozenset()
    paths: frozenset[str] = frozenset()
    embeds: bool = False
    claims: Callable[[CheckpointInfo], Claim | None] | None = None
    serves: str = ""
    streams: Mapping[InputPort, StreamInfo] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "streams", MappingProxyType(streams(self.walks)))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The modalities its walks put out to the client, sorted; then those of its prompts."""
        routes = (route for walk in self.walks.values() for node in walk.node_table for route in node.routes)
        put_out = sorted({route.to.modality for route in routes if isinstance(route.to, Client)})
        return (*put_out, *(sorted(OF_PROMPTS) if self.embeds else ()))

    @property
    def tracks(self) -> dict[str, str]:
        """The track of each node that speaks to the client; it has no name where one node alone speaks."""
        speaking = {
            node.name
            for walk in self.walks.values()
            for node in walk.node_table
            if any(isinstance(route.to, Client) for route in node.routes)
        }
        return {node: node if len(speaking) > 1 else "" for node in sorted(speaking)}

    @property
    def digest(self) -> str:
        """The digest of nodes and walks: equal for equal graphs, in every process."""
        walks = {name: walk.describe() for name, walk in self.walks.items()}
        return digest_of((self.family, {n: str(kind) for n, kind in self.nodes.items()}, walks))


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuResult:
    """What a CPU node came to: facts for the plan, and handles for later walks."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Handle] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The shape of a KV node's keys and values."""

    layers: int
    kv_heads: int
    head_dim: int


class Peers(Protocol):
    """The members that share one copy of a node, as its modules meet them. All of them do the same at once.

    Attributes:
        index: which of them this one is, from 0.
        size: how many there are.
    """

    @property
    def index(self) -> int: ...
    @property
    def size(self) -> int: ...

    def add(self, tensor: "torch.Tensor") -> None:
        """Put the sum of all members' tensors in the place of each."""
        ...

    def join(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """All members' tensors, one behind the other along the last dimension."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOf:
    """Which chunk of a stream a firing takes.

    Attributes:
        number: from 0.
        fresh: how many of its items, the last ones, no chunk before it had.
        last: no chunk follows.
    """

    number: int
    fresh: int
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One firing of a stateless node.

    Attributes:
        inputs: tensors on the node's device, by edge. They are shared: read them, do not write into them.
        args: the walk's arguments.
        chunk: of the node's streaming input, where it has one.
        seed: the request's; with the node's name and `path` it keys every draw of randomness.
        path: the iteration of each loop around it, outermost first.
    """

    inputs: Mapping[str, "torch.Tensor"]
    args: Mapping[str, Any]
    seed: int = 0
    path: tuple[int, ...] = ()
    chunk: ChunkOf | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatelessResult:
    """What one firing of a stateless node came to; `stops` are loops that end with this iteration.

    The outputs are taken as they are, not copied: a node does not write into them again.
    """

    outputs: Mapping[str, "torch.Tensor"]
    facts: Mapping[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()


class StatelessNode(Protocol):
    """A node without a state of its own: encoders, decoders, vocoders, denoisers.

    `nodes.load(checkpoint, node, ...)` of a family makes it. `run` is called by one thread.
    """

    @property
    def max_batch(self) -> int:
        """How many firings one call may take together."""
        ...

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Fire once for each item; an item's result does not depend on those beside it.

        An exception in an item's place fails that item alone; one that is raised fails them all.
        """
        ...


class TextDecoder(Protocol):
    """Token ids to text, one at a time."""

    def push(self, token_id: int) -> str:
        """The text this token completes; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is left at the end: an incomplete character becomes U+FFFD."""
        ...

    def bytes_of(self, token_id: int) -> bytes:
        """The token's own bytes, whatever came before: a part of a character, at times."""
        ...


class Processing(Protocol):
    """The CPU face, loaded once per worker. `run` is called from threads and must be re-entrant."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer; none for a family that generates none."""
        ...

    @property
    def tool_calls(self) -> str:
        """How its model writes calls of tools (`models.text.tool_calls`); empty where it cannot."""
        ...

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        """Run the CPU node `node`. `key` prefixes the keys of the handles it puts out.

        Raises:
            ClientError: the request asks for something impossible.
        """
        ...

    def text_decoder(self) -> TextDecoder:
        """A fresh decoder for one output."""
        ...
