"""The program `actions`: a prefix that is computed once, then the steps of a flow from noise to actions.

    prefix    rows of the images, then the tokens of the text; all see one another       committed
    state     the robot's state, which sees the prefix                                   committed (Pi0)
    actions   noisy actions, which see all before them and one another                   once for each step

The prefix is computed by the node, all else by its expert, over the same cells. The state does not depend on
the time of the flow, so it is computed once as well.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from models.programs import Mask, Pass
from models.robot_policy.expert import NAME, ActionExpert
from models.robot_policy.graph import ACTIONS
from models.vision_language.decoder import VlmDecoder

_CONTEXT: Final = "robot"


def first_noise(seed: int, horizon: int, action_dim: int) -> torch.Tensor:
    """The noise that a request's actions begin with, (horizon, action_dim) float32, on the CPU."""
    return torch.randn(horizon, action_dim, generator=torch.Generator().manual_seed(seed % 2**63))


def times_of(steps: int) -> list[float]:
    """The times of the flow at which velocities are computed, from 1 to just above 0."""
    return [1.0 - step / steps for step in range(steps)]


class ActionFlow:
    """One run of the program (`models.programs.Driver`).

    Args:
        rows: of the images, (n, hidden).
        token_ids: of the text, (t,).
        state: of the robot, in the model's numbers.
        noise: (horizon, action numbers).
        steps: of the flow.
    """

    max_contexts = 1

    def __init__(
        self,
        node: VlmDecoder,
        expert: ActionExpert,
        *,
        rows: torch.Tensor,
        token_ids: torch.Tensor,
        state: torch.Tensor,
        noise: torch.Tensor,
        steps: int,
    ) -> None:
        text = node.text_model.embed_tokens(token_ids.long())
        self._expert = expert
        self._prefix: torch.Tensor | None = torch.cat([rows.to(text.dtype), text])
        self._state = expert.state_rows(state)
        self._actions = noise
        self._times = times_of(steps)
        self._step = 0
        own = 0 if self._state is None else len(self._state)
        self.max_tokens: Final = len(self._prefix) + own + len(noise)
        self.longest_pass: Final = max(len(self._prefix), len(noise))

    def passes(self) -> Sequence[Pass]:
        """The prefix, then the state, then the actions once for each step."""
        if self._prefix is not None:
            return [Pass(context=_CONTEXT, embeds=self._prefix, mask=Mask.FULL, commits=True)]
        if self._state is not None:
            return [Pass(context=_CONTEXT, embeds=self._state, mask=Mask.FULL, commits=True, tower=NAME)]
        rows = self._expert.action_rows(self._actions, self._times[self._step])
        return [Pass(context=_CONTEXT, embeds=rows, mask=Mask.FULL, tower=NAME)]

    def take(self, hidden: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor] | None:
        """Take one step of the flow along the velocity."""
        if self._prefix is not None:
            self._prefix = None
            return None
        if self._state is not None:
            self._state = None
            return None
        [states] = hidden
        self._step += 1
        self._actions = self._actions - self._expert.velocity(states) / len(self._times)
        return {ACTIONS: self._actions} if self._step == len(self._times) else None


class PolicyNode(VlmDecoder):
    """The KV node: PaliGemma's language model with the program `actions`, and its expert."""

    masks = frozenset({"causal", "full"})
    full_ignores_window = True

    def __init__(self, decoder: VlmDecoder, expert: ActionExpert) -> None:
        super().__init__(
            decoder.model,
            name=decoder.name,
            layout=decoder.layout,
            max_positions=decoder.max_positions,
            weights_digest=decoder.weights_digest,
        )
        self.expert: Final = expert
        self.towers: Final = {NAME: expert}
        self.programs: Final = {ACTIONS: self._start}

    def _start(
        self, node: Any, inputs: Mapping[str, torch.Tensor], args: Mapping[str, Any], *, seed: int
    ) -> ActionFlow:
        settings = self.expert.settings
        return ActionFlow(
            node,
            self.expert,
            rows=inputs["rows"],
            token_ids=inputs["token_ids"],
            state=inputs["state"],
            noise=first_noise(seed, settings.horizon, settings.action_dim).to(self.device),
            steps=args.get("steps") or settings.steps,
        )
