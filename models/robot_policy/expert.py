"""The action expert: a smaller Gemma over the cells of the prefix.

It is a tower of the KV node `LLM` that shares the node's cells: its layers have the same keys and values.
Its tokens are no text: a robot's state, and noisy actions at a time of the flow. Families define how these
become embeddings (`ActionExpert.action_rows`), and the layers.
"""

import math
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.gemma.modeling_gemma import GemmaModel

from models.base import KVLayout, TokenStep
from models.robot_policy.settings import PolicySettings

NAME: Final = "expert"


class ExpertNetwork(PreTrainedModel):  # type: ignore[misc] # transformers has no types
    """The layers of an expert, `dit`, and its projections. Families add theirs.

    The projections compute in float32, whatever the dtype of the layers is, as they were trained.
    """

    config_class = GemmaModel.config_class
    base_model_prefix = "dit"
    _supports_attention_backend = True
    _supports_sdpa = True
    _keep_in_fp32_modules_strict: tuple[str, ...] = ("action_in_proj", "action_out_proj")

    def __init__(self, config: Any, settings: PolicySettings) -> None:
        super().__init__(config)
        self.dit = self.make_layers(config)
        self.dit.embed_tokens = None
        self.action_in_proj = nn.Linear(settings.action_dim, config.hidden_size)
        self.action_out_proj = nn.Linear(config.hidden_size, settings.action_dim)

    def make_layers(self, config: Any) -> Any:
        """The layers, and the last norm."""
        return GemmaModel(config)


class ActionExpert:
    """An expert as a tower of a KV node (`workers.kv_engine.node.HeadlessNode`). Families derive from it.

    Attributes:
        shares_cells: its keys and values are in the cells of the node.
        embed_width: the numbers in a row that stands for a token.
    """

    masks = frozenset({"causal", "full"})
    shares_cells = True

    def __init__(
        self, network: Any, settings: PolicySettings, *, layout: KVLayout, max_positions: int
    ) -> None:
        self.name: Final = NAME
        self.architecture: Final = type(network).__name__
        self.kernels: Final = "torch"
        self.layout: Final = layout
        self.max_positions: Final = max_positions
        self.network: Final = network
        self.settings: Final = settings
        self._stock_attention: str = network.dit.config._attn_implementation  # noqa: SLF001 - no public reader
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device, dtype=self.dtype)

    @property
    def hidden_size(self) -> int:
        return int(self.network.config.hidden_size)

    @property
    def embed_width(self) -> int:
        return self.hidden_size

    @property
    def device(self) -> torch.device:
        return torch.device(self.network.device)

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.network.dit.layers[0].self_attn.q_proj.weight.dtype
        return found

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.network.parameters())

    def use_attention(self, name: str) -> None:
        self.network.dit.set_attn_implementation(name)

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        return self.states(inputs, step.positions, self._no_mask)

    @torch.inference_mode()
    def reference_states(self, rows: torch.Tensor) -> torch.Tensor:
        served = self.network.dit.config._attn_implementation  # noqa: SLF001 - no public reader
        count = len(rows)
        mask = torch.full((count, count), -torch.inf, device=self.device, dtype=self.dtype).triu(1)
        self.use_attention(self._stock_attention)
        try:
            return self.states(rows, torch.arange(count, device=self.device), mask[None, None]).float()
        finally:
            self.use_attention(served)

    def states(self, inputs: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The states after the last norm, (T, hidden).

        Args:
            inputs: (T, embed_width).
            positions: (T,).
            mask: what the attention function takes.
        """
        raise NotImplementedError

    def state_rows(self, state: torch.Tensor) -> torch.Tensor | None:
        """The row of a state, (state numbers,) -> (1, embed_width); None if the prompt has it as text."""
        raise NotImplementedError

    def action_rows(self, actions: torch.Tensor, time: float) -> torch.Tensor:
        """The rows of noisy actions, (horizon, action numbers) -> (horizon, embed_width), float32."""
        raise NotImplementedError

    def velocity(self, hidden: torch.Tensor) -> torch.Tensor:
        """The velocity of actions, (horizon, hidden) -> (horizon, action numbers), float32."""
        found: torch.Tensor = self.network.action_out_proj(hidden.float())
        return found

    def time_waves(self, times: torch.Tensor) -> torch.Tensor:
        """The sines and cosines that stand for times of the flow, (n,) -> (n, hidden) float32.

        Their periods are spread evenly, by their logarithms, between the checkpoint's bounds.
        """
        settings, half = self.settings, self.hidden_size // 2
        share = torch.linspace(0.0, 1.0, half, dtype=torch.float64, device=self.device)
        periods = settings.min_period * (settings.max_period / settings.min_period) ** share
        angles = times.double()[:, None] * (2 * math.pi / periods)
        return torch.cat([angles.sin(), angles.cos()], dim=1).float()
