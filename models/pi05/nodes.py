"""The torch nodes of Pi0.5. The time of the flow is the condition of its expert's adaptive norms."""

from typing import Any, Final

import torch
from torch import nn

from models.pi05.adaptive import AdaptiveGemma
from models.pi05.graph import MAX_TOKENS
from models.robot_policy.expert import ActionExpert, ExpertNetwork
from models.robot_policy.nodes import PolicyLoader
from models.robot_policy.settings import PolicySettings


class Pi05Network(ExpertNetwork):
    """The weights of Pi0.5's expert."""

    _keep_in_fp32_modules_strict = (
        *ExpertNetwork._keep_in_fp32_modules_strict,  # noqa: SLF001 - transformers' name of it
        "time_mlp_in",
        "time_mlp_out",
        "dense",
    )

    def __init__(self, config: Any, settings: PolicySettings) -> None:
        super().__init__(config, settings)
        self.time_mlp_in = nn.Linear(config.hidden_size, config.hidden_size)
        self.time_mlp_out = nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()

    def make_layers(self, config: Any) -> Any:
        return AdaptiveGemma(config)


class Pi05Expert(ActionExpert):
    """Pi0.5's expert. A row is the embedding of an action, and the time of the flow as a last number.

    Actions of several requests, at several times, are computed together.
    """

    @property
    def embed_width(self) -> int:
        return self.hidden_size + 1

    def state_rows(self, state: torch.Tensor) -> None:
        return None

    def action_rows(self, actions: torch.Tensor, time: float) -> torch.Tensor:
        embeds = self.network.action_in_proj(actions)
        return nn.functional.pad(embeds, (0, 1), value=time)

    def states(self, inputs: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        times, token = torch.unique(inputs[:, -1], return_inverse=True)
        found: torch.Tensor = self.network.dit(
            inputs_embeds=inputs[None, :, :-1].to(self.dtype),
            position_ids=positions.unsqueeze(-2),
            attention_mask=mask,
            condition=self.condition(times),
            token=token,
        )
        return found

    def condition(self, times: torch.Tensor) -> torch.Tensor:
        """The conditions of times of the flow, (n,) -> (n, hidden) float32."""
        network, silu = self.network, nn.functional.silu
        found: torch.Tensor = silu(network.time_mlp_out(silu(network.time_mlp_in(self.time_waves(times)))))
        return found


_LOADER: Final = PolicyLoader(Pi05Network, Pi05Expert, max_tokens=MAX_TOKENS)
load: Final = _LOADER.load
examine: Final = _LOADER.examine
