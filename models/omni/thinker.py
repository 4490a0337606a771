"""The KV node `Thinker`: a language model that sees and hears, and sends the states that its talker needs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from models.base import TokenStep
from models.omni.graph import STATES
from models.omni.positions import omni_positions
from models.sequence_request import PromptPart
from models.vision_language.axes import GridDecoder


class OmniThinker(GridDecoder):
    """Writes the text. Families add the layers that their rows of media need.

    Attributes:
        rules: the class of transformers that has `get_rope_index`.
        state_layer: the number of layers after which the states are sent; 0: after all, and the last norm.
    """

    rules: Any = None
    state_layer: int = 0

    def positions(self, prompt_ids: Sequence[int], parts: Sequence[PromptPart]) -> tuple[torch.Tensor, float]:
        return omni_positions(self.model, self.rules, prompt_ids, parts)

    def forward_with_states(
        self, inputs: Any, step: TokenStep
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """The hidden states, and for each token its embedding and its state after a layer: (T, 2, hidden)."""
        found: list[torch.Tensor] = []
        layer = self.text_model.layers[self.state_layer - 1]
        hook = layer.register_forward_hook(lambda _module, _inputs, output: found.append(output[0]))
        try:
            hidden = self.forward(inputs, step)
        finally:
            hook.remove()
        states = found[0] if self.state_layer else hidden
        return hidden, {STATES.name: torch.stack([self._embeds_of(inputs), states], dim=1)}

    def _embeds_of(self, inputs: Any) -> torch.Tensor:
        """The input of the first layer."""
        if not isinstance(inputs, torch.Tensor):
            embeds: torch.Tensor = inputs[0]
            return embeds
        if inputs.is_floating_point():
            return inputs
        found: torch.Tensor = self.text_model.embed_tokens(inputs)
        return found
