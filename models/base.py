"""Contracts of model families: the graph, and the interfaces of their CPU nodes and torch nodes.

    graph.py        pure: nodes, walks, plan, claim               imported by conductor, workers, gateway
    processing.py   CPU nodes: tokenizer, chat template, media    imported by workers; no torch
    nodes.py        torch modules                                 imported by workers

A family is a folder of `models`, or a package with an entry point of the group `dalsegno.models` (see
`models.registry`). The contract of KV nodes is `workers.kv_engine.node.KVNode`.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import msgspec

from models.checkpoints.claims import CheckpointInfo, Claim
from models.media.reader import MediaReader as MediaReader  # noqa: PLC0414 - a part of the contract
from models.options import check_declaration
from models.room import Room
from shared.errors import BugError
from shared.events import Guide, Inputs, digest_of
from shared.plans import Plan, PlanRequest
from shared.tensors import Handle
from shared.walks import CompiledWalk, Fixed, InputPort, StreamLink, ToClient, WalkError, link_streams

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch


TEXT: Final = "text"
TOKEN: Final = "token"  # noqa: S105 - an edge's name
"""The output of a KV node that holds the token sampled last."""
EMBEDDING: Final = "embedding"
"""The modality of embeddings: float32, little-endian. Of one text (`Inputs.text`) a vector, (dimensions,); of
`Inputs.texts`, (texts, dimensions). Of a multi-vector model the vectors of all texts one after the other,
(vectors, dimensions), and the output `VECTORS` beside it."""
VECTORS: Final = "vectors"
"""The modality of the numbers of vectors of each text, by a multi-vector model: (texts,) int32."""
SCORE: Final = "score"
"""The modality of the scores of `Inputs.texts` against their queries, (texts,): float32, little-endian."""
HIDDEN_STATES: Final = "hidden_states"
"""The modality of a prompt's last hidden states, (tokens, hidden): float32, little-endian, in pieces."""
OF_PROMPTS: Final = frozenset({EMBEDDING, HIDDEN_STATES})
"""Modalities of outputs that are computed from the prompt alone; nothing is generated."""


class EngineKind(StrEnum):
    """The executor of a node: a CPU thread (`processing.py`), the KV engine, or the stateless engine."""

    CPU = "cpu"
    KV = "kv"
    STATELESS = "stateless"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGraph:
    """The nodes, walks and plan of a family. Pure: it imports no tokenizer and no torch.

    Attributes:
        family: the name of the family.
        nodes: the executor of each node.
        walks: compiled, by name.
        plan: starts the plan of one request.
        modalities: the input modalities, e.g. `("text",)`. The output modalities follow from the walks, see
            `outputs`.
        media: by modality, what a client needs to decode the bytes of a chunk, e.g. the sample rate of audio.
        repository: the usual checkpoint on the Hugging Face hub; empty if there is none.
        former_nodes: names of nodes that published placements have and the family does not; they are
            ignored.
        former_walks: names of removed walks that published placements still use; they are ignored.
        optional: nodes that a placement may leave out. Walks that need one of them then do not run, and the
            plan sees it (`Limits.absent_nodes`).
        voices: the voices of a speech model, the default first. If a deployment declares further ones,
            its `processing.load` gets all of them as `voices`.
        kwargs: the keys of `model_kwargs` that belong to the family; `nodes.load` receives them.
        paths: those of `kwargs` that are paths. In a file they are relative to it; `load` gets absolute
            paths.
        options: the family's own request parameters: a struct whose fields all have defaults, with bounds
            (`msgspec.Meta`) and a docstring with the section `Attributes`. None: it has none.
        takes_adapters: its KV node takes LoRA adapters.
        cuts_prompts: a prompt without media is truncated if the request asks for it.
        takes_texts: a request may have several texts (`Inputs.texts`), each with a result of its own.
        token_programs: its KV nodes generate tokens by programs (`models.programs.TokenProgram`): an answer
            stays on the rank that began it.
        embeds: its KV node can emit an embedding or the hidden states of a prompt (`pooling`).
        max_positions: the longest sequence of checkpoints whose `config.json` does not state it, because it
            is the default of their class; None: every checkpoint states it.
        states_length: `config.json` states the longest sequence. False: it states that of a text without the
            frames before it, and `max_positions` counts.
        claims: the claim to a checkpoint folder, for `dalsegno serve FOLDER`; None: the family is served by
            name only.
        serves: the checkpoints it claims, in words, for error messages.
        room: for a family of programs, the room that its requests take in the KV cache, by the checkpoint
            folder, which may be empty.
        remarks: what is to be known of a checkpoint under the deployment's `model_kwargs`, in sentences:
            `dalsegno check` and `GET /v1/models` show them. It raises a `CheckpointError` for one that cannot
            be served here.
        streams: the streams between its walks, by the stream's name and the consuming node; derived.

    Raises:
        WalkError: a stream has no producer, no single consumer, or producers whose edges differ; or a KV node
            sends its tokens to the client in another modality than text, or takes a stream in a way that it
            cannot.
        OptionsError: an option has no default or no description, or the name of another parameter.
    """

    family: str
    nodes: Mapping[str, EngineKind]
    walks: Mapping[str, CompiledWalk]
    plan: Callable[[PlanRequest], Plan]
    modalities: tuple[str, ...] = ("text",)
    media: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    repository: str = ""
    former_nodes: frozenset[str] = frozenset()
    former_walks: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    voices: tuple[str, ...] = ()
    kwargs: frozenset[str] = frozenset()
    paths: frozenset[str] = frozenset()
    options: type[msgspec.Struct] | None = None
    cuts_prompts: bool = False
    takes_texts: bool = False
    takes_adapters: bool = False
    token_programs: bool = False
    embeds: bool = False
    max_positions: int | None = None
    states_length: bool = True
    claims: Callable[[CheckpointInfo], Claim | None] | None = None
    serves: str = ""
    room: Callable[[Path], Sequence[Room]] | None = None
    remarks: Callable[[Path, Mapping[str, Any]], Sequence[str]] | None = None
    streams: Mapping[InputPort, StreamLink] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.options is not None:
            check_declaration(self.options)
        self._check_token_edges()
        object.__setattr__(self, "streams", MappingProxyType(link_streams(self.walks)))
        self._check_streams_to_kv_nodes()

    def _check_token_edges(self) -> None:
        """Check that the tokens of KV nodes go to the client as text: nothing else is made of them."""
        for walk in self.walks.values():
            routes = (route for node in walk.node_table for route in node.routes)
            for route in routes:
                if self.nodes.get(route.source) is not EngineKind.KV or route.edge != TOKEN:
                    continue
                if isinstance(route.to, ToClient) and route.to.modality != TEXT:
                    raise WalkError(
                        f"walk {walk.name!r}: edge {TOKEN!r} of KV node {route.source!r} goes to {route.to}, "
                        f'but tokens reach the client as text only: send them to CLIENT("{TEXT}"), or to a '
                        "CPU or stateless node that makes something else of them"
                    )

    def _check_streams_to_kv_nodes(self) -> None:
        """Check that a KV node takes one stream, an item for each token, and sends no token to the client."""
        taking = [name for _, name in self.streams if self.nodes.get(name) is EngineKind.KV]
        for (stream, name), link in self.streams.items():
            sending = [node for _, node in link.producers if self.nodes.get(node) is EngineKind.KV]
            if sending and stream != TOKEN and link.only is not None:
                raise WalkError(
                    f"KV node {sending[0]!r} streams tensors {stream!r} to {name!r} with only={link.only}: "
                    "expected a range for tokens alone; select in the node"
                )
            if name not in taking:
                continue
            where = f"walk {link.consumer_walk!r}: KV node {name!r}"
            walk = self.walks[link.consumer_walk]
            if taking.count(name) > 1:
                raise WalkError(f"{where} takes {taking.count(name)} streams: expected one; join them first")
            if link.policy != Fixed(1) or link.after_end != "empty":
                raise WalkError(
                    f"{where} takes the stream {stream!r} in chunks of {link.policy}, "
                    f"after_end={link.after_end!r}: expected an item for each of its tokens, "
                    'chunks=Fixed(1), after_end="empty"'
                )
            loop = walk.loop_table[walk.nodes[name].loop]
            if not loop.index or not loop.resident:
                raise WalkError(f"{where} takes a stream outside of a loop of its own: expected a Loop")
            routes = (
                route for one in self.walks.values() for node in one.node_table for route in node.routes
            )
            if any(route.source == name and isinstance(route.to, ToClient) for route in routes):
                raise WalkError(
                    f"{where} takes a stream and sends tokens to the client: after a crash they would be "
                    "computed again; send what it says through a CPU or stateless node"
                )

    def without(self, absent: Collection[str]) -> Self:
        """The graph without some of its nodes, and without the walks that need them."""
        if not absent:
            return self
        return replace(
            self,
            nodes={node: kind for node, kind in self.nodes.items() if node not in absent},
            walks={name: walk for name, walk in self.walks.items() if not {*walk.nodes} & {*absent}},
        )

    @property
    def outputs(self) -> tuple[str, ...]:
        """The output modalities of its walks, sorted, followed by those of `OF_PROMPTS` if it has them."""
        routes = (route for walk in self.walks.values() for node in walk.node_table for route in node.routes)
        emitted = sorted({route.to.modality for route in routes if isinstance(route.to, ToClient)})
        return (*emitted, *(sorted(OF_PROMPTS) if self.embeds else ()))

    def truncates(self, inputs: Inputs) -> bool:
        """Return whether the texts of a request are truncated if it asks for that."""
        is_embedded = self.embeds and EMBEDDING in inputs.output_modalities
        return self.takes_texts or ((is_embedded or self.cuts_prompts) and not inputs.files)

    @property
    def tracks(self) -> dict[str, str]:
        """The track of each node that emits output to the client; empty if there is a single one."""
        output_nodes = {
            node.name
            for walk in self.walks.values()
            for node in walk.node_table
            if any(isinstance(route.to, ToClient) for route in node.routes)
        }
        return {node: node if len(output_nodes) > 1 else "" for node in sorted(output_nodes)}

    @property
    def digest(self) -> str:
        """The digest of family, nodes and walks: equal for equal graphs, in every process."""
        walks = {name: walk.describe() for name, walk in self.walks.items()}
        return digest_of((self.family, {n: str(kind) for n, kind in self.nodes.items()}, walks))


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideToCheck:
    """A client's guide that has to be checked before the result of a CPU node counts.

    Attributes:
        param: the parameter of the request that the guide was made from, for errors; empty: the guide itself.
    """

    guide: Guide
    param: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuResult:
    """The result of a CPU node: facts for the plan, and its output tensors, by edge.

    Attributes:
        outputs: a handle with inline data is written to the log, so that a replay can read it: token ids. An
            array above 1 KiB stays in the worker's memory, and travels between workers as tensors do:
            pixels, audio. The node must not write into an array that it has returned.
        guide: the worker checks and compiles it in a queue of its own (`workers.guides`); None if there is
            none.
        progress, previews: as in `StatelessResult`.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    outputs: "Mapping[str, Handle | npt.NDArray[Any]]" = field(default_factory=dict)
    guide: GuideToCheck | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)
    previews: "Mapping[str, Handle | npt.NDArray[Any]]" = field(default_factory=dict)

    def handle(self, edge: str) -> Handle:
        """Return the handle of an output whose data are inline: token ids.

        Raises:
            BugError: the output is an array.
        """
        found = self.outputs[edge]
        if not isinstance(found, Handle):
            raise BugError(f"edge {edge!r}: expected a handle with inline data, found an array")
        return found


@dataclass(frozen=True, slots=True)
class CellShape:
    """The numbers that a layer of a KV node keeps of a token.

    Attributes:
        heads: the KV heads.
        key, value: the numbers of a head's key, and of its value. At the end of a key stands that of the
            layer's indexer, if it has one.
        is_latent: a value is the beginning of its key, so that keys alone are stored (latent attention).
    """

    heads: int
    key: int
    value: int
    is_latent: bool = False

    @property
    def numbers(self) -> int:
        """The stored numbers per token."""
        return self.heads * (self.key if self.is_latent else self.key + self.value)


@dataclass(frozen=True, slots=True)
class StateShape:
    """A recurrent state that a layer of a KV node keeps of a sequence, however long it is.

    Attributes:
        is_float32: it is float32 in a node of any dtype, such as sums over all tokens.
    """

    shape: tuple[int, ...]
    is_float32: bool

    def nbytes(self, itemsize: int) -> int:
        """The bytes of a sequence's state in a node whose numbers have `itemsize` bytes."""
        return math.prod(self.shape) * (4 if self.is_float32 else itemsize)


INDEXES: Final = "indexes"
"""The form of attention to the keys that an indexer chooses (`KVLayout.needs`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The shape of a KV node's keys and values, and of its recurrent states.

    Attributes:
        kv_heads, head_dim: of each layer, or of the first one with attention if layers differ.
        cells: the shapes of all layers; empty if all keys and values are (kv_heads, head_dim). A layer
            without attention has none of a token (`heads` is 0).
        needs: the forms of attention that a kernel has to declare (`attention.kernels.forms_of`).
        states: the recurrent states of each layer; empty if no layer has any.
    """

    layers: int
    kv_heads: int
    head_dim: int
    cells: tuple[CellShape, ...] = ()
    needs: frozenset[str] = frozenset()
    states: tuple[tuple[StateShape, ...], ...] = ()

    def state_bytes(self, itemsize: int) -> int:
        """The bytes of a sequence's recurrent states, of all layers."""
        return sum(state.nbytes(itemsize) for layer in self.states for state in layer)

    @property
    def has_indexers(self) -> bool:
        """True if layers attend to the keys that an indexer chooses."""
        return INDEXES in self.needs

    @property
    def shapes(self) -> tuple[CellShape, ...]:
        """The shape of each layer's cells."""
        return self.cells or (CellShape(self.kv_heads, self.head_dim, self.head_dim),) * self.layers

    @property
    def numbers(self) -> int:
        """The stored numbers per token, of all layers."""
        return sum(shape.numbers for shape in self.shapes)


class TokenStep(Protocol):
    """The part of a step that a KV node may read.

    Attributes:
        token_ids: (T,) int32, the ids of the packed tokens.
        positions: (T,) int32, the position of each token in its sequence, from 0; (axes, T) for a node with
            several axes, and float32 for one with positions between whole numbers.
        routes: (T,) int8, the set of weights of each token, in a node that has several
            (`models.programs.Pass.routes`); None: 0 for all.
        long_factors: (T,) int32, 1 for the tokens of sequences beyond the node's `rotary_change`; None for a
            node without.
    """

    @property
    def token_ids(self) -> "torch.Tensor": ...
    @property
    def positions(self) -> "torch.Tensor": ...
    @property
    def routes(self) -> "torch.Tensor | None": ...
    @property
    def long_factors(self) -> "torch.Tensor | None": ...


class Peers(Protocol):
    """The tensor-parallel group of a node, as its modules use it. All members call the same methods in turn.

    Attributes:
        index: the index of this member, from 0.
        size: the number of members.
    """

    @property
    def index(self) -> int: ...
    @property
    def size(self) -> int: ...

    def add(self, tensor: "torch.Tensor") -> None:
        """Replace the tensor by the sum of all members' tensors, in place (all-reduce)."""
        ...

    def join(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Concatenate all members' tensors along the last dimension (all-gather)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOf:
    """The chunk of a stream that one execution of a node consumes.

    Attributes:
        number: counts the chunks of the stream, from 0.
        fresh: the number of its items, at its end, that were in no earlier chunk.
        last: no chunk follows.
    """

    number: int
    fresh: int
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """The input of one execution of a stateless node.

    Attributes:
        inputs: tensors on the node's device, by edge. They are shared: a node must not write into them.
        args: the arguments of the walk, plain values.
        seed: the request's seed. All randomness must be derived from it, the node's name and `path`.
        path: the iteration of each loop around the node, the outermost first.
        chunk: the chunk of the node's streaming input, if it has one.
    """

    inputs: Mapping[str, "torch.Tensor"]
    args: Mapping[str, Any]
    seed: int = 0
    path: tuple[int, ...] = ()
    chunk: ChunkOf | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatelessResult:
    """The result of one execution of a stateless node.

    Attributes:
        outputs: tensors, by edge. They are not copied: the node must not write into them again. For an edge
            to `CLIENT("text")` the tensor is the text in UTF-8, of dtype uint8.
        facts: plain values for the plan.
        stops: the loops that end with this iteration.
        progress: plain values for the client, such as `{"step": 3, "steps": 50}`; empty for none. Progress
            and previews are advisory: they are no part of the answer, and may get lost.
        previews: by modality, a tensor for the client of at most 512 KiB.
    """

    outputs: Mapping[str, "torch.Tensor"]
    facts: Mapping[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    progress: Mapping[str, Any] = field(default_factory=dict)
    previews: Mapping[str, "torch.Tensor"] = field(default_factory=dict)


class StatelessNode(Protocol):
    """A node without state between executions: an encoder, a decoder, a vocoder, a denoiser.

    `nodes.load(checkpoint, node, ...)` of a family returns it. One thread calls `run`.
    """

    @property
    def max_batch(self) -> int:
        """The most items of one call of `run`.

        A node may have three further members that keep unlike or expensive items out of one batch:
        `group(item)`: only items of equal groups are batched, such as images of one size; `cost(item)`: a
        number, such as the patches of an image; `max_cost`: the most of a batch of several items. A node
        that has a `models.encoder_cache.EncoderCache` names it `encoder_cache`.
        """
        ...

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Execute the node once per item. The result of an item must not depend on the others in the batch.

        An exception in the place of a result fails that item alone; an exception that is raised fails all.
        """
        ...


class TextDecoder(Protocol):
    """Detokenizer of one output: token ids to text, one at a time."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """The rest of the text; an incomplete character becomes U+FFFD."""
        ...

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of the token by itself; they may be a part of a character."""
        ...


class Processing(Protocol):
    """The CPU nodes of a checkpoint: what `processing.load(checkpoint, *, max_seq_len)` of a family returns.

    A family that decodes media gets a `MediaReader` as a further keyword argument, `media`.

    A worker loads it once and calls `run` from several threads: it must be re-entrant. A family whose plan
    passes guides to its KV node implements `models.text.guiding.Guiding` too. All members are required, also
    in a family without text.
    """

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The end-of-sequence tokens; empty for a family that generates no tokens."""
        ...

    @property
    def tool_calls(self) -> str:
        """The name of the format of tool calls (`models.text.tool_calls`); empty if there is none.

        A family may have one more name, `reasoning`, of the format of reasoning (`models.text.reasoning`).
        """
        ...

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        """Execute the CPU node `node`. The same inputs and arguments must give the same result.

        `key` is the prefix of the keys of its output handles; `args` are the walk's arguments, plain values.

        Raises:
            ClientError: the request is invalid, or cannot be served.
        """
        ...

    def text_decoder(self) -> TextDecoder:
        """A new detokenizer, for one output. Called only for sequences of KV nodes."""
        ...


class TextlessProcessing:
    """The members of `Processing` that a family without tokens has to have."""

    eos_ids: tuple[int, ...] = ()
    tool_calls: str = ""

    def text_decoder(self) -> TextDecoder:
        raise BugError("expected no sequence of a KV node: the family generates no tokens")
