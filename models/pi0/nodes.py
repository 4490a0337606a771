"""The torch nodes of Pi0. Its expert is a Gemma; an MLP joins each noisy action with the time of the flow."""

from typing import Any, Final

import torch
from torch import nn

from models.pi0.graph import MAX_TOKENS
from models.robot_policy.expert import ActionExpert, ExpertNetwork
from models.robot_policy.nodes import PolicyLoader
from models.robot_policy.settings import PolicySettings


class Pi0Network(ExpertNetwork):
    """The weights of Pi0's expert."""

    _keep_in_fp32_modules_strict = (
        *ExpertNetwork._keep_in_fp32_modules_strict,  # noqa: SLF001 - transformers' name of it
        "state_proj",
        "action_time_mlp_in",
        "action_time_mlp_out",
    )

    def __init__(self, config: Any, settings: PolicySettings) -> None:
        super().__init__(config, settings)
        width = config.hidden_size
        self.state_proj = nn.Linear(settings.state_dim, width)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)
        self.post_init()


class Pi0Expert(ActionExpert):
    """Pi0's expert: the state is a token of its own."""

    def states(self, inputs: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        output = self.network.dit(
            inputs_embeds=inputs.to(self.dtype)[None],
            position_ids=positions.unsqueeze(-2),
            attention_mask=mask,
            use_cache=False,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def state_rows(self, state: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.network.state_proj(state[None])
        return rows

    def action_rows(self, actions: torch.Tensor, time: float) -> torch.Tensor:
        waves = self.time_waves(torch.tensor([time], device=self.device)).expand(len(actions), -1)
        joined = torch.cat([self.network.action_in_proj(actions), waves], dim=1)
        mixed = nn.functional.silu(self.network.action_time_mlp_in(joined))
        rows: torch.Tensor = self.network.action_time_mlp_out(mixed)
        return rows


_LOADER: Final = PolicyLoader(Pi0Network, Pi0Expert, max_tokens=MAX_TOKENS)
load: Final = _LOADER.load
examine: Final = _LOADER.examine
