"""The KV node `rollout_predictor`: the predictor over a paged pool. It has programs, and no language head."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models.base import KVLayout, TokenStep
from models.vjepa2_ac.mpc import Mpc, MpcRequest
from models.vjepa2_ac.predictor import AcPredictor, Attention
from models.vjepa2_ac.rollout import Rollout

MAX_POSITIONS: Final = 16_384
"""The longest sequence: M*'s."""


class RolloutNode:
    """The node (`workers.kv_engine.node.HeadlessNode`). A row of a pass is a token of a frame."""

    masks = frozenset({"causal", "full"})
    position_axes = 3
    kernels = "torch"
    max_positions = MAX_POSITIONS

    def __init__(self, network: AcPredictor, name: str) -> None:
        settings = network.settings
        heads = settings.pred_num_attention_heads
        self.name: Final = name
        self.architecture: Final = type(network).__name__
        self.network: Final = network
        self.layout: Final = KVLayout(
            layers=settings.pred_num_hidden_layers,
            kv_heads=heads,
            head_dim=settings.pred_hidden_size // heads,
        )
        self.embed_width: Final = settings.pred_hidden_size
        self.programs: Final = {"rollout": self._start_rollout, "mpc": self._start_mpc}
        self._attention: Any = None

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.network.parameters())

    def use_attention(self, name: str) -> None:
        self._attention = ALL_ATTENTION_FUNCTIONS[name]

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        positions = step.positions.expand(self.position_axes, -1)
        return self.network.states(inputs[None], positions, self._attend)[0]

    @torch.inference_mode()
    def reference_states(self, rows: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(len(rows), device=self.device).expand(self.position_axes, -1)
        return self.network.states(rows[None], positions, _causal)[0].float()

    def _attend(
        self, module: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        found: torch.Tensor = self._attention(module, query, key, value, None)[0]
        return found

    def _start_rollout(
        self, node: Any, inputs: Mapping[str, torch.Tensor], args: Mapping[str, Any], *, seed: int
    ) -> Rollout:
        return Rollout(self.network, inputs["frame"], inputs["controls"], horizon=args["horizon"])

    def _start_mpc(
        self, node: Any, inputs: Mapping[str, torch.Tensor], args: Mapping[str, Any], *, seed: int
    ) -> Mpc:
        return Mpc.start(self.network, inputs, MpcRequest.of(args), seed=seed)


def _causal(_: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
