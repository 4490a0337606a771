"""Layers of transformers with a recurrent state: linear attention, Mamba, short convolutions.

Such a layer keeps of a sequence not its tokens but a state of fixed size: the last inputs of a convolution,
and mostly a sum over all tokens. Its module continues from the state in a cache of transformers. Here its
`forward` is replaced: inside `mixing_by`, a function decides which tokens are one sequence, and from which
states they continue (`Recurrence`). Elsewhere a module computes as it always does.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import local
from typing import Any, Final, TypeAlias

import torch
from transformers import cache_utils

_StatesLayer: Final[Any] = getattr(cache_utils, "LinearAttentionLayer", None)
"""Transformers' cache of one layer with recurrent states, in versions that have it."""
_UPDATE: Final = "update_conv_state"
"""The method of transformers' caches that every such module calls."""
_WITHOUT_START: Final = "mamba_selective_scan"
"""Transformers' function of the first Mamba: it computes several tokens from the beginning alone."""


class Recurrence:
    """A layer's module with a recurrent state, as a function of hidden states and states.

    Attributes:
        layer: the number of the layer.
    """

    def __init__(self, module: Any) -> None:
        self.layer: Final = int(module.layer_idx)
        self.own_forward: Final = module.forward
        parameters = inspect.signature(module.forward).parameters
        self._cache: Final = "cache_params" if "cache_params" in parameters else "past_key_values"
        self._continues_by_token: Final = _WITHOUT_START in _names_in_forward(module)

    def run(
        self, hidden: torch.Tensor, states: Sequence[torch.Tensor] | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Compute the next tokens of some sequences.

        Args:
            hidden: (B, N, width), N tokens of each sequence.
            states: what the layer keeps of each sequence, each (B, ...), which may be overwritten; None:
                these are the first tokens.

        Returns:
            The outputs, (B, N, width), and the states after the tokens.
        """
        kept = _StatesLayer()
        if states is not None:
            _fill(kept, states)
        pieces = hidden.shape[1] if states is not None and self._continues_by_token else 1
        outputs = [
            self.own_forward(piece, **{self._cache: _OneLayer(kept)}) for piece in hidden.chunk(pieces, dim=1)
        ]
        found = [kept.conv_states[0], kept.recurrent_states[0]]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return output, [state for state in found if state is not None]


def _fill(kept: Any, states: Sequence[torch.Tensor]) -> None:
    """Let transformers' cache of a layer continue from states: the convolution's, then the sum, if any."""
    convolved = states[0]
    kept.device, kept.dtype = convolved.device, convolved.dtype
    kept.conv_states[0], kept.conv_kernel_size[0] = convolved, convolved.shape[-1]
    kept.is_conv_states_initialized[0] = kept.has_previous_state[0] = True
    if len(states) > 1:
        kept.recurrent_states[0], kept.is_recurrent_states_initialized[0] = states[1], True


class _SameLayer(list[Any]):
    """A list with one layer at every place."""

    def __getitem__(self, _: Any) -> Any:
        return super().__getitem__(0)


class _OneLayer(cache_utils.Cache):  # type: ignore[misc] # transformers has no types
    """A cache of the layer that is computed: modules ask it by the number of their layer."""

    def __init__(self, kept: Any) -> None:
        self.layers = _SameLayer([kept])


# ---- replacing modules' forward ----------------------------------------------------------------------

Mixing: TypeAlias = Callable[[Recurrence, torch.Tensor], torch.Tensor]
"""Computes the outputs of a layer, (1, T, width), from hidden states of that shape."""

_thread: Final = local()


@contextmanager
def mixing_by(mixing: Mixing) -> Iterator[None]:
    """Inside, layers with a recurrent state are computed in this thread by `mixing`."""
    _thread.mixing = mixing
    try:
        yield
    finally:
        _thread.mixing = None


def attach_recurrences(model: torch.nn.Module) -> None:
    """Let the layers of a model of transformers that have recurrent states be computed by `mixing_by`."""
    if _StatesLayer is None:  # an older transformers: without states such a model fails its self-check
        return
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int) and _UPDATE in _names_in_forward(module):
            module.forward = _mixed(Recurrence(module))


def _names_in_forward(module: torch.nn.Module) -> Sequence[str]:
    """The functions and attributes that the code of a module's class uses in `forward`."""
    own = inspect.unwrap(type(module).forward)
    names: Sequence[str] = getattr(getattr(own, "__code__", None), "co_names", ())
    return names


def _mixed(recurrence: Recurrence) -> Callable[..., torch.Tensor]:
    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        mixing: Mixing | None = getattr(_thread, "mixing", None)
        if mixing is None:
            own: torch.Tensor = recurrence.own_forward(hidden_states, *args, **kwargs)
            return own
        return mixing(recurrence, hidden_states)

    return forward
