"""Makes a node with weights in the wanted form, and tells the error of few bits."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final, TypeVar

import torch

from workers.kv_engine.kernel_models import TextModel
from workers.kv_engine.node import KVNode, exact_cells_of, fill, token_programs_of
from workers.kv_engine.quantisation.forms import float_layers
from workers.kv_engine.quantisation.kept_weights import KeptWeights, Origin
from workers.kv_engine.quantisation.matrices import experts_of, left_in, linears_of, names_of
from workers.kv_engine.quantisation.wanted import Quantisation
from workers.kv_engine.text_logits import Comparison, Predictions, predictions

_LOGGER: Final = logging.getLogger(__name__)
_Node = TypeVar("_Node", bound=KVNode)


def measured(node: KVNode, quantisation: Quantisation, make: Callable[[KeptWeights | None], _Node]) -> _Node:
    """Return the node that `make` makes of `node`, with weights in the form that is wanted.

    The log tells how well it predicts the text of `quantisation`, beside the node with floats.

    `make` gets the quantised matrices that are in files or are written to them, if any.
    """
    kept = _kept_weights_of(node, quantisation)
    is_known = kept is not None and kept.is_whole
    if (quantisation.bits is not None and not is_known) or not quantisation.keeps_stored:
        fill(node, but=getattr(node, "left_floats", {}))  # integers are computed with as floats
    text = list(quantisation.measured)
    if len(text) < 2 or token_programs_of(node):  # these do not predict the next token of a text
        text = []
    floats = None
    if text and quantisation.bits is not None and not is_known:
        model = TextModel.of(node)
        with float_layers(linears_of(model), experts_of(model), left_in(node)):
            floats = Predictions.of(node.reference(torch.tensor(text, device=node.device)), text)
    made = make(kept)
    error = kept.error if kept is not None else None
    few = None
    if floats is not None or (text and quantisation.rounds_cells):
        with exact_cells_of(made) or nullcontext():
            few = predictions(made, text)
    if floats is not None and few is not None:
        error = Comparison.of(few, floats)
    if error is not None:
        _LOGGER.info("%s: weights of %s: %s", node.name, quantisation.numbers, error)
    if few is not None and quantisation.rounds_cells:
        _LOGGER.info(
            "%s: keys and values of int8: %s", node.name, Comparison.of(predictions(made, text), few)
        )
    if kept is not None:
        kept.finish(error)
    return made


def _kept_weights_of(node: Any, quantisation: Quantisation) -> KeptWeights | None:
    """The node's quantised weights in files; None if nothing is quantised, or nothing kept."""
    if quantisation.bits is None or quantisation.kept_beside is None:
        return None
    origin = Origin(
        checkpoint=quantisation.kept_beside,
        node=node.name,
        weights=node.weights_digest,
        dtype=node.dtype,
        bits=quantisation.bits,
        calibration=tuple(quantisation.calibration),
        measured=tuple(quantisation.measured),
    )
    shapes = {name: tuple(matrix.weight.shape) for matrix, name in names_of(TextModel.of(node)).items()}
    try:
        return KeptWeights(origin, shapes)
    except OSError as error:  # the weights are loaded, so this is a link to nowhere, for example
        _LOGGER.warning("quantised weights are neither read nor kept: %s", error)
        return None
