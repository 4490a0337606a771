"""Sampling parameters of requests: the request's own over the defaults of a checkpoint. No torch."""

import logging
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from models.checkpoints.files import CheckpointError, read_json_if_present
from models.sequence_request import SamplingParams
from models.text.generation_config import APPLIED, FILE, remarks_of
from models.text.tokenizer import PromptTokenizer
from shared.events import Params
from shared.validation_errors import validation_problem

_LOGGER: Final = logging.getLogger(__name__)
_T = TypeVar("_T")


class Defaults(Params, frozen=True, kw_only=True):
    """The defaults of a checkpoint: parameters of requests, and one that no request has.

    Attributes:
        length_decay: see `models.sequence_request.SamplingParams`.
    """

    length_decay: tuple[Annotated[int, Meta(ge=0)], Annotated[float, Meta(gt=0)]] | None = None


def generation_defaults(checkpoint: Path) -> Defaults:
    """The sampling defaults of a checkpoint, from its `generation_config.json`.

    Raises:
        CheckpointError: the file is malformed, or a value is out of bounds.
    """
    path = checkpoint / FILE
    config = read_json_if_present(path)
    for remark in remarks_of(checkpoint):
        _LOGGER.warning("%s: %s", checkpoint, remark)
    wanted = {ours: config[name] for name, ours in APPLIED.items() if config.get(name) is not None}
    if isinstance(wanted.get("stop"), str):
        wanted["stop"] = [wanted["stop"]]
    if config.get("do_sample") is False:
        wanted["temperature"] = 0.0
    try:
        return msgspec.convert(wanted, Defaults)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {validation_problem(error, wanted, Defaults).message}") from error


def effective_sampling(params: Params, defaults: Params, tokenizer: PromptTokenizer) -> SamplingParams:
    """The sampling parameters of a request: its own over `defaults` over temperature 1 and all tokens.

    Parameters other than temperature, top-p and top-k are absent if they have no effect.

    Raises:
        ClientError: a token id is outside the vocabulary, or a bad word has no token.
    """
    biases = [(int(id), bias) for id, bias in params.logit_bias.items()]
    tokenizer.check_ids("logit_bias", [id for id, _ in biases])
    tokenizer.check_ids("allowed_token_ids", params.allowed_token_ids)
    repetition_penalty = _first(params.repetition_penalty, defaults.repetition_penalty, 1.0)
    return SamplingParams(
        temperature=_first(params.temperature, defaults.temperature, 1.0),
        top_p=_first(params.top_p, defaults.top_p, 1.0),
        top_k=max(_first(params.top_k, defaults.top_k, 0), 0),
        min_p=_first(params.min_p, defaults.min_p, 0.0) or None,
        repetition_penalty=None if repetition_penalty == 1 else repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=biases,
        bad_words=tokenizer.spellings(_first(params.bad_words, defaults.bad_words, [])),
        allowed_token_ids=sorted(set(params.allowed_token_ids)),
        min_tokens=_first(params.min_tokens, defaults.min_tokens, 0) or None,
        length_decay=defaults.length_decay if isinstance(defaults, Defaults) else None,
    )


def _first(own: _T | None, default: _T | None, neutral: _T) -> _T:
    """The request's own value, or else the checkpoint's, or else the neutral one."""
    if own is not None:
        return own
    return neutral if default is None else default
