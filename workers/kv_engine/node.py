"""The KV node contract: the methods and attributes that the KV engine needs of a model.

    backbone        embed(token_ids)        input of `forward`, for packed tokens
                    forward(inputs, step)   hidden states; its layers attend over the paged pool
    language head   head(hidden, indices)   logits at chosen tokens

    prompts with media positions, splice    of nodes whose prompts have images or video (`MediaBackbone`)
    programs            programs            of nodes that run programs (`models.programs`)

A node that only runs programs may lack the language head (`HeadlessNode`).

A node knows no sequences, blocks or requests. It computes one packed batch of T tokens; the attention
function separates the sequences in it. All methods are called in the engine's thread.

The last two parts are optional. `position_axes_of`, `embed_width_of`, `masks_of` and `programs_of` read them
of any node.

A backbone whose long sequences have other rotary angles than short ones has the attribute `rotary_change`
(`rotary_change_of`), and reads in `TokenStep.long_factors` which tokens belong to long ones.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from models.base import KVLayout, TokenStep
from models.programs import Program, TokenProgram
from models.sequence_request import PromptPart
from shared.errors import BugError

if TYPE_CHECKING:
    from models.transformers_lm.adapters import AdaptedModules

FULL: Final = "full"
"""The mask of tokens that see later ones: of an image, or of a pass of a program."""
CAUSAL_ONLY: Final = frozenset({"causal"})
"""The masks of a node, or an attention kernel, that declares none."""


class Backbone(Protocol):
    """The layers of a model: token ids to hidden states.

    Attributes:
        name: the name of the node in the model's graph. The random draws of its sequences depend on it.
        architecture: the name of the model class in the checkpoint's `config.json`.
        layout: the shape of its keys and values: layers, KV heads, numbers per head.
        kernels: the implementation of its layers: `torch`, `triton`, or the variant of the CPU kernels.
        max_positions: the longest sequence that the model supports, in tokens.
        parameters: the number of its parameters. On a CPU it decides the number of threads.
        device: the device of its weights, its inputs and its outputs.
        dtype: the dtype of its weights, hidden states, keys and values.
    """

    @property
    def name(self) -> str: ...
    @property
    def architecture(self) -> str: ...
    @property
    def layout(self) -> KVLayout: ...
    @property
    def kernels(self) -> str: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def parameters(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def use_attention(self, name: str) -> None:
        """Set the attention function of all layers to the one registered as `name`.

        Functions are registered with `transformers.AttentionInterface`; the engine's is
        `workers.kv_engine.attention.paged.paged_attention`. Called once, before the first `forward`.
        """
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the input of `forward` for (T,) int32 token ids.

        Either embeddings, (T, hidden) of `dtype`, or the ids themselves if `forward` embeds them.
        """
        ...

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        """Return the hidden states of the T tokens after the last layer, (T, hidden) of `dtype`.

        Each layer calls the attention function with its packed queries, keys and values. That function stores
        the keys and values in the pool and attends over the pool.

        Args:
            inputs: the result of `embed`.
            step: the token ids and positions; the engine sets the other tensors in a context of the thread.
        """
        ...


class LanguageHead(Protocol):
    """The output layer of a model: hidden states to logits.

    Attributes:
        vocab_size: the number of logits per token. Token ids are from 0 to `vocab_size` - 1.
    """

    @property
    def vocab_size(self) -> int: ...

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return the logits at S of the T tokens, (S, vocab_size) float32.

        The result is a new tensor: penalties, masks and filters are applied to it in place.

        Args:
            hidden: (T, hidden), the result of `forward`.
            indices: (S,) int32 or int64, indices of tokens in `hidden`.
        """
        ...


class KVNode(Backbone, LanguageHead, Protocol):
    """A model that the engine can run: a backbone, a language head, and the reference for its self-check."""

    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of one sequence as the stock model computes them, (T, vocab_size) float32.

        The stock model computes all tokens in one pass, with its own attention and without a pool. At load,
        `workers.kv_engine.selfcheck.check_node` compares the logits over the pool with these.

        Args:
            token_ids: (T,) int64, the ids of one sequence from its beginning.
        """
        ...


class HeadlessNode(Backbone, Protocol):
    """A model without token ids and logits: it has programs only, or is a tower of a node with programs.

    All its passes bring embeddings: the input of `forward` are the rows of all tokens. `embed` is never
    called, and neither it nor `splice` has to be there.

    Attributes:
        embed_width: the numbers in a row that stands for a token, a multiple of whatever `forward` needs.
    """

    @property
    def embed_width(self) -> int: ...

    def reference_states(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the states of one causal sequence as the stock model computes them, (T, hidden) float32.

        In place of `KVNode.reference`, for the self-check.

        Args:
            rows: (T, embed_width), at the positions 0 to T - 1.
        """
        ...


class MediaBackbone(Backbone, Protocol):
    """A backbone whose prompts may have images or video: rows that replace embeddings of their tokens.

    Attributes:
        position_axes: the number of rotary positions of a token. With several, `Step.positions` is (axes, T).
        embed_width: the numbers in a row: the hidden size, and once more for each of the first layers after
            which a row is added to the token's state. 0 for a node that takes none.
        masks: the masks of its prompts and programs: `causal`, and `full` if tokens may see later ones.

    A node whose tokens may have positions between whole numbers has the attribute `fractional_positions`,
    which is true: its positions are float32 in place of int32.

    A node with several sets of weights may have a further method, `routes(prompt_ids, parts)`: the set of
    each token of a prompt with parts, (T,) int8. `forward` reads them in `step.routes`.
    """

    @property
    def position_axes(self) -> int: ...
    @property
    def embed_width(self) -> int: ...
    @property
    def masks(self) -> frozenset[str]: ...

    def positions(self, prompt_ids: Sequence[int], parts: Sequence[PromptPart]) -> tuple[torch.Tensor, float]:
        """Return the positions of a prompt, (axes, T) on the CPU, and the one of the next token."""
        ...

    def splice(self, token_ids: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> Any:
        """Return the input of `forward` for tokens of which some are replaced by rows.

        Args:
            token_ids: (T,) int32.
            rows: (N, `embed_width`), or (N, hidden) where nothing is added after layers.
            at: (N,) int64, the tokens that they replace.
        """
        ...


class ProgramNode(Backbone, Protocol):
    """A backbone that runs programs. Each of the attributes is optional.

    Attributes:
        programs: by name. Their passes may bring embeddings (`MediaBackbone.splice`, which then is required).
        token_programs: by name: those that generate the tokens of a sequence.
        towers: further models, by name, for passes with `Pass.tower`; each with a KV pool of its own. A tower
            whose attribute `shares_cells` is true reads and writes the node's pool: its layers and heads have
            the node's layout, and its passes see what the node has written.
    """

    @property
    def programs(self) -> Mapping[str, Program]: ...
    @property
    def token_programs(self) -> Mapping[str, TokenProgram]: ...
    @property
    def towers(self) -> "Mapping[str, KVNode]": ...


def position_axes_of(node: Backbone) -> int:
    """Return the number of rotary positions of a token; 1 for a node that declares none."""
    axes: int = getattr(node, "position_axes", 1)
    return axes


def position_dtype_of(node: Backbone) -> torch.dtype:
    """Return the type of a node's positions."""
    return torch.float32 if getattr(node, "fractional_positions", False) else torch.int32


def full_ignores_window_of(node: Backbone) -> bool:
    """Return whether tokens of a full part see one another beyond the window of a layer."""
    ignores: bool = getattr(node, "full_ignores_window", False)
    return ignores


def kv_dtype_of(node: Backbone) -> torch.dtype:
    """Return the type of a node's keys and values: its own, unless it rounds them."""
    dtype: torch.dtype = getattr(node, "kv_dtype", node.dtype)
    return dtype


def rotary_change_of(node: Backbone) -> int | None:
    """Return the length of the longest sequence with short rotary factors, in tokens.

    All keys of a sequence have the same factors. None for a node whose factors do not depend on the length.
    """
    change: int | None = getattr(node, "rotary_change", None)
    return change


def embed_width_of(node: Backbone) -> int:
    """Return the numbers in a row that replaces an embedding; 0 for a node that takes none."""
    width: int = getattr(node, "embed_width", 0)
    return width


def masks_of(node: Backbone) -> frozenset[str]:
    """Return the masks of a node's prompts and programs; only `causal` for a node that declares none."""
    masks: frozenset[str] = getattr(node, "masks", CAUSAL_ONLY)
    return masks


def has_head(node: Backbone) -> bool:
    """Return whether a node has token ids and logits; a `HeadlessNode` has neither."""
    return hasattr(node, "head")


def vocab_size_of(node: Backbone) -> int:
    """Return the number of a node's tokens; 0 for a node without a language head."""
    size: int = getattr(node, "vocab_size", 0)
    return size


def head_of(node: Backbone, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return logits (`LanguageHead.head`).

    Raises:
        BugError: the node has no language head.
    """
    head = getattr(node, "head", None)
    if head is None:
        raise BugError(f"node {node.name!r} has no language head: expected passes without logits")
    logits: torch.Tensor = head(hidden, indices)
    return logits


def programs_of(node: Backbone) -> Mapping[str, Program]:
    """Return a node's programs by name; empty for a node without."""
    programs: Mapping[str, Program] = getattr(node, "programs", {})
    return programs


def token_programs_of(node: Backbone) -> Mapping[str, TokenProgram]:
    """Return a node's token programs by name; empty for a node without."""
    programs: Mapping[str, TokenProgram] = getattr(node, "token_programs", {})
    return programs


def towers_of(node: Backbone) -> Mapping[str, KVNode]:
    """Return a node's towers by name; empty for a node without."""
    towers: Mapping[str, KVNode] = getattr(node, "towers", {})
    return towers


def adapted_modules_of(node: Backbone) -> "AdaptedModules | None":
    """Return the modules of a node that LoRA adapters may change; None for a node that takes none."""
    return getattr(node, "adapted_modules", None)


def rounds_inputs_of(node: Backbone) -> bool:
    """Return whether a node rounds what its matrices are multiplied with, or keys and values, to few bits."""
    rounds: bool = getattr(node, "rounds_inputs", False)
    return rounds


def choosing_all_of(node: Backbone) -> AbstractContextManager[None]:
    """Return a context in which indexers choose all keys, and experts of the CPU kernels see all tokens."""
    own: Callable[[], AbstractContextManager[None]] = getattr(node, "choosing_all", nullcontext)
    return own()


def exact_cells_of(node: Backbone) -> AbstractContextManager[None] | None:
    """Return a context in which a node keeps keys and values as floats; None if it always does."""
    own: Callable[[], AbstractContextManager[None]] | None = getattr(node, "exact_cells", None)
    return own() if own is not None and kv_dtype_of(node) != node.dtype else None


def fill(node: Backbone, *, but: Collection[str] = ()) -> None:
    """Read weights of a node that are still in its files (`models.transformers_lm.left_weights`)."""
    own: Callable[..., None] | None = getattr(node, "fill", None)
    if own is not None:
        own(but=but)


def splice(node: Backbone, token_ids: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> Any:
    """Return the input of `forward` for tokens of which some are replaced (`MediaBackbone.splice`).

    All tokens of a node without a language head have rows.

    Raises:
        BugError: the node takes no embeddings.
    """
    if not has_head(node):
        return rows.new_zeros(len(token_ids), rows.shape[1]).index_copy(0, at, rows)
    own = getattr(node, "splice", None)
    if own is None:
        raise BugError(f"node {node.name!r} has no method splice: expected one, because embeddings are given")
    return own(token_ids, rows, at)
