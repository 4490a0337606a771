"""Tensors per computed token that go into streams: one output per sequence and step."""

from collections.abc import Iterable, Mapping

import torch

from workers.data_plane.arrays import to_array
from workers.kv_engine.outputs import StateOutput
from workers.kv_engine.sequence import Span


def sends_any(spans: Iterable[Span]) -> bool:
    """True if a sequence of the step sends a tensor per computed token."""
    return any(span.sequence.spec.sends for span in spans)


def states_to_send(
    spans: Iterable[Span], states: Mapping[str, torch.Tensor], *, step: int
) -> list[StateOutput]:
    """Return the outputs of a step: of each token once, also if it is computed again.

    Args:
        spans: those of the step's sequences, the first of its packed tokens.
        states: by edge, (T, ...) for the packed tokens.
        step: the number of the step.
    """
    on_host = {name: state.detach().cpu() for name, state in states.items()}
    found: list[StateOutput] = []
    offset = 0
    for span in spans:
        spec, new = span.sequence.spec, span.unreported
        first, end = offset + new.start - span.start, offset + span.count
        if spec.sends and first < end:
            values = {name: to_array(on_host[name][first:end]) for name in spec.sends & on_host.keys()}
            found.append(StateOutput(key=spec.key, values=values, step=step))
        offset = end
    return found
