"""The KV node `LLM`: BAGEL's language model, with the rows of latents, and their velocities.

`LLM_cfg_text` and `LLM_cfg_img` are the same node under other names, on further ranks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import Qwen2Config

from models.bagel.flow import start_branch, start_flow
from models.bagel.folder import LLM_CONFIG, SIZED, Sizes, bracket_ids, read_ema
from models.bagel.mot import MoTModel
from models.bagel.parts import LatentModel, bracketed
from models.bagel.previews import LatentColors
from models.bagel.spans import LATENTS
from models.base import KVLayout, TokenStep
from models.checkpoints.files import read_json
from models.checkpoints.progress import Progress
from models.checkpoints.weights import weights_digest
from models.programs import Program
from models.sequence_request import PromptPart
from models.transformers_lm.architecture import choose_dtype, config_of, max_positions_of
from models.transformers_lm.probe import probe_layout
from models.transformers_lm.tensors import load_weights
from models.vision_language.decoder import VlmDecoder
from shared.errors import ClientError

MEMBERS: Final = frozenset({"language_model", "time_embedder", "vae2llm", "llm2vae", "latent_pos_embed"})
"""The members of the whole model that the node has."""


class _Language(nn.Module):
    """The body of the language model, and its head."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        self.model = MoTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class BagelForConditionalGeneration(LatentModel):
    """The language model and the modules around latents, named as published."""

    base_model_prefix = "language_model"

    def add_members(self, config: Any) -> None:
        super().add_members(config)
        self.language_model = _Language(config)
        self.llm2vae = nn.Linear(config.hidden_size, config.latent_width)

    @property
    def base_model(self) -> MoTModel:
        """The body of the language model."""
        return self.language_model.model

    @property
    def lm_head(self) -> nn.Linear:
        """The head of the language model."""
        return self.language_model.lm_head

    def get_input_embeddings(self) -> nn.Module:
        """The embeddings of tokens."""
        embeddings: nn.Module = self.language_model.model.embed_tokens
        return embeddings


class BagelLM(VlmDecoder):
    """A node of the KV engine for texts, images, and the flow over latents.

    Attributes:
        latent_channels: the numbers in a token of latents.
        colors: of latents, for previews; None: there are none.
        programs: `flow` and `branch` (`models.bagel.flow`).
    """

    masks = frozenset({"causal", "full"})

    def __init__(
        self,
        model: BagelForConditionalGeneration,
        *,
        name: str,
        layout: KVLayout,
        max_positions: int,
        weights_digest: str,
        brackets: tuple[int, int],
    ) -> None:
        super().__init__(
            model, name=name, layout=layout, max_positions=max_positions, weights_digest=weights_digest
        )
        self.latent_channels: Final[int] = model.vae2llm.in_features
        self.colors: LatentColors | None = None
        self.programs: Final[Mapping[str, Program]] = {"flow": start_flow, "branch": start_branch}
        self._brackets = torch.tensor(brackets, device=self.device)

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        given = {"inputs_embeds" if inputs.is_floating_point() else "input_ids": inputs[None]}
        output = self.text_model(
            **given, position_ids=step.positions[None], attention_mask=self._no_mask, routes=step.routes
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden.index_select(0, indices))
        return logits.float()

    @torch.inference_mode()
    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        served = self.text_config._attn_implementation  # noqa: SLF001 - no public reader
        self.text_model.set_attn_implementation(self._stock_attention)
        try:
            hidden = self.text_model(input_ids=token_ids[None]).last_hidden_state[0]
        finally:
            self.text_model.set_attn_implementation(served)
        logits: torch.Tensor = self.lm_head(hidden)
        return logits.float()

    def positions(self, prompt_ids: Sequence[int], parts: Sequence[PromptPart]) -> tuple[torch.Tensor, int]:
        """The positions of a prompt's T tokens, (1, T) int32, and the next one: an image has one position."""
        steps = torch.ones(len(prompt_ids), dtype=torch.int32)
        for part in parts:
            steps[part.start : part.start + part.count - 1] = 0
        ends = steps.cumsum(0, dtype=torch.int32)
        return (ends - steps)[None], int(ends[-1]) if len(ends) else 0

    def routes(self, prompt_ids: Sequence[int], parts: Sequence[PromptPart]) -> torch.Tensor:
        """The routes of a prompt's T tokens, (T,) int8: 1 for latents, not for the tokens around them."""
        routes = torch.zeros(len(prompt_ids), dtype=torch.int8)
        for part in parts:
            if part.modality == LATENTS:
                routes[part.start + 1 : part.start + part.count - 1] = 1
        return routes

    def latent_embeds(self, latents: torch.Tensor, time: float, grid: tuple[int, int]) -> torch.Tensor:
        """Latents of an image as the input of a pass.

        Args:
            latents: (n, latent_channels), row by row.
            time: of the flow: 1 is noise, 0 the image.
            grid: its rows and columns of tokens; their product is n.

        Returns:
            (n + 2, hidden), with the tokens around the image.

        Raises:
            ClientError: the image has more rows or columns than the model has positions for.
        """
        side = self.model.latent_pos_embed.side
        if max(grid) > side:
            raise ClientError(
                f"expected an image of at most {side} x {side} tokens, found {grid[0]} x {grid[1]}",
                code="invalid_value",
            )
        rows = self.model.latent_rows(latents, time, grid)
        return bracketed(rows, self.text_model.embed_tokens(self._brackets))

    def velocity(self, hidden: torch.Tensor) -> torch.Tensor:
        """The velocities of latents, (n, latent_channels) float32, of a pass's states, (n + 2, hidden)."""
        found: torch.Tensor = self.model.llm2vae(hidden[1:-1])
        return found.float()


def load_llm(
    folder: Path, name: str, *, device: str | torch.device, dtype: str, progress: Progress
) -> BagelLM:
    """Load the language model of a checkpoint under the name of a node.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
        UnsupportedArchitectureError: the language model has layers that cannot be served over a paged pool.
    """
    brackets, shard = bracket_ids(folder), read_ema(folder, MEMBERS)
    config = llm_config(folder)
    max_positions = max_positions_of(config, {})
    layout = probe_layout(BagelForConditionalGeneration, config, max_positions)
    on = torch.device(device)
    chosen = choose_dtype(dtype, on, [shard])
    model = load_weights(BagelForConditionalGeneration, config, [shard], on, chosen, progress)
    return BagelLM(
        model,
        name=name,
        layout=layout,
        max_positions=max_positions,
        weights_digest=weights_digest([shard]),
        brackets=brackets,
    )


def examine_llm(folder: Path) -> int:
    """Check the config of the language model; return its longest sequence.

    Raises:
        CheckpointError, UnsupportedArchitectureError: `load_llm` would raise it too.
    """
    config = _text_config(folder)
    config.latent_width = config.latent_side = 1
    longest = max_positions_of(config, {})
    probe_layout(BagelForConditionalGeneration, config, longest)
    return longest


def llm_config(folder: Path) -> Any:
    """The config of the language model, with the sizes that the tensors tell.

    Raises:
        CheckpointError: a file is missing, damaged or unsupported.
    """
    config, sizes = _text_config(folder), Sizes.of(read_ema(folder, SIZED))
    config.latent_width, config.latent_side = sizes.latent_width, sizes.latent_side
    return config


def _text_config(folder: Path) -> Any:
    """The config of the language model, with what the published code sets in it."""
    raw = read_json(folder / LLM_CONFIG) | {"tie_word_embeddings": False}
    return config_of(BagelForConditionalGeneration, raw, folder)
