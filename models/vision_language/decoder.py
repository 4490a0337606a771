"""The KV node of vision-language models: the language model of transformers' own class, without its tower.

The rows of the tower replace the embeddings of placeholder tokens (`splice`). Everything after it is the
language model's: scaled embeddings, soft caps and the head are computed as its class does.
"""

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from models.base import KVLayout, Peers
from models.checkpoints.progress import Progress, silent
from models.checkpoints.weights import read_shards, weights_digest
from models.sequence_request import PromptPart
from models.transformers_lm.attention_forms import attach_forms
from models.transformers_lm.node import DecoderLM
from models.transformers_lm.probe import probe_layout
from models.transformers_lm.recurrent import attach_recurrences
from models.transformers_lm.sharding import SilentPeers, sharded
from models.vision_language.halves import Checkpoint, is_of_tower, language_half, load_half

KERNELS: Final = MappingProxyType(
    {
        "LlamaModel": "LlamaForCausalLM",
        "MistralModel": "MistralForCausalLM",
        "Qwen2Model": "Qwen2ForCausalLM",
        "Qwen2VLTextModel": "Qwen2ForCausalLM",
        "Qwen2_5_VLTextModel": "Qwen2ForCausalLM",
        "Qwen3Model": "Qwen3ForCausalLM",
        "Qwen3VLTextModel": "Qwen3ForCausalLM",
    }
)
"""The language models that equal those of another class, by the name of their own."""


class VlmDecoder(DecoderLM):
    """A node of the KV engine that takes rows for a part of its tokens.

    Attributes:
        position_axes: the number of positions of a token.
        embed_width: the numbers in a row that replaces an embedding.
        masks: the kinds of mask that its parts may ask for.
        text_model: the body of its language model: `embed_tokens`, `layers`, `norm`.
        text_config: the config of its language model.
        text_architecture: the class of language models whose layers are the same; empty if there is none.
    """

    position_axes: int = 1
    masks: frozenset[str] = frozenset({"causal"})

    def __init__(
        self, model: Any, *, name: str, layout: KVLayout, max_positions: int, weights_digest: str
    ) -> None:
        super().__init__(
            model, name=name, layout=layout, max_positions=max_positions, weights_digest=weights_digest
        )
        self.text_model: Final = model.base_model
        self.text_config: Final = self.text_model.config
        self.lm_head: Final = model.lm_head
        self.text_architecture: Final = KERNELS.get(type(self.text_model).__name__, "")
        self.embed_width: int = int(self.text_config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.text_config.vocab_size)

    def positions(self, prompt_ids: Sequence[int], parts: Sequence[PromptPart]) -> tuple[torch.Tensor, float]:
        """The positions of a prompt's T tokens, (axes, T) int32, and the position of the next token."""
        return torch.arange(len(prompt_ids), dtype=torch.int32)[None], len(prompt_ids)

    def splice(self, token_ids: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """The input of `forward`: embeddings, (T, hidden); at `at`, (N,), they are `rows`, (N, width)."""
        embeds: torch.Tensor = self.text_model.embed_tokens(token_ids).clone()
        embeds[at] = rows.to(embeds.dtype)
        return embeds


def load_decoder(
    folder: Path,
    name: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    peers: Peers | None = None,
    node_class: type[VlmDecoder] = VlmDecoder,
) -> VlmDecoder:
    """Load the language model of a checkpoint folder; see `models.transformers_lm.loader.load_decoder`.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
        UnsupportedArchitectureError: the language model has layers that cannot be served over a paged pool.
    """
    return decoder_of(
        Checkpoint.read(folder),
        name,
        device=device,
        dtype=dtype,
        progress=progress,
        peers=peers,
        node_class=node_class,
    )


def decoder_of(
    checkpoint: Checkpoint,
    name: str,
    *,
    device: str | torch.device,
    dtype: str,
    progress: Progress,
    peers: Peers | None,
    node_class: type[VlmDecoder],
) -> VlmDecoder:
    """Load the language model of a checkpoint, as `load_decoder` does."""
    layout = probe_layout(
        _half(checkpoint, peers, is_connected=False), checkpoint.config, checkpoint.max_positions
    )
    of_tower = is_of_tower(checkpoint.model_class, checkpoint.config)
    model = load_half(
        _half(checkpoint, peers, is_connected=True),
        checkpoint,
        lambda tensor: not of_tower(tensor),
        device=torch.device(device),
        dtype=dtype,
        progress=progress,
    )
    attach_forms(model)
    attach_recurrences(model)
    return node_class(
        model,
        name=name,
        layout=layout,
        max_positions=checkpoint.max_positions,
        weights_digest=weights_digest(read_shards(checkpoint.folder)),
    )


def examine_decoder(folder: Path, *, members: int = 1) -> int:
    """Check a checkpoint for `members` ranks, by its `config.json` alone; return its longest sequence.

    Raises:
        CheckpointError, UnsupportedArchitectureError: `load_decoder` would raise it too.
    """
    return examined(Checkpoint.read(folder), members=members)


def examined(checkpoint: Checkpoint, *, members: int) -> int:
    """Check a checkpoint, as `examine_decoder` does."""
    part = _half(checkpoint, SilentPeers(0, members) if members > 1 else None, is_connected=False)
    probe_layout(part, checkpoint.config, checkpoint.max_positions)
    return checkpoint.max_positions


def _half(checkpoint: Checkpoint, peers: Peers | None, *, is_connected: bool) -> Any:
    """The class of this member's part of the language model."""
    half = language_half(checkpoint.model_class)
    if peers is None:
        return half
    return sharded(half, peers if is_connected else SilentPeers(peers.index, peers.size))
