"""The result of a `prepare` node, for a prompt of token ids: checks, effective sampling, and facts."""

from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from models.base import CpuResult, GuideToCheck
from models.sequence_request import PoolingParams, PreparedPrompt, PromptReasoning
from models.text.sampling_defaults import effective_sampling
from models.text.tokenizer import PromptTokenizer
from shared.events import Guide, Params
from shared.tensors import inline_ids


def prepare_prompt(
    key: str,
    ids: list[int],
    params: Params,
    *,
    tokenizer: PromptTokenizer,
    defaults: Params,
    check_guide: Callable[[Guide, Sequence[int]], None] | None = None,
    text: str | None = None,
    pooling: PoolingParams | None = None,
    guide: Guide | UnsetType | None = UNSET,
    guide_param: str = "",
    reasoning: PromptReasoning | None = None,
) -> CpuResult:
    """Check a prompt and its parameters, and return what the plan and the KV node need of them.

    `key` is the prefix of the keys of the outputs, `defaults` are the sampling parameters of the checkpoint.
    `check_guide` raises an error if this model cannot follow guides; it is called with the guide and the
    request's `stop_token_ids`, and None for a family whose `prepare` refuses guides itself. The guide itself
    is not compiled here: it is a part of the result. `guide_param` is the parameter it was made from.
    `pooling` is for a request without an answer; `guide` and `reasoning` are as in `PreparedPrompt`.

    Raises:
        ClientError: the prompt is empty or too long, or a parameter is invalid for this model.
    """
    is_answered = params.max_tokens != 0 and not params.warm and pooling is None
    tokenizer.check_prompt(ids, new_tokens=1 if is_answered else 0)
    tokenizer.check_ids("stop_token_ids", params.stop_token_ids)
    if params.guide is not None and check_guide is not None:
        check_guide(params.guide, params.stop_token_ids)
    facts = PreparedPrompt(
        prompt_tokens=len(ids),
        sampling=effective_sampling(params, defaults, tokenizer),
        prompt_text=_echoed(params, ids, text, tokenizer),
        pooling=pooling,
        guide=guide,
        stop=[] if params.stop else defaults.stop,
        reasoning=reasoning,
    )
    return CpuResult(
        facts=msgspec.to_builtins(facts),
        outputs={"token_ids": inline_ids(f"{key}/token_ids", ids)},
        guide=GuideToCheck(guide=params.guide, param=guide_param) if params.guide is not None else None,
    )


def _echoed(params: Params, ids: list[int], text: str | None, tokenizer: PromptTokenizer) -> str | None:
    """The text of the echo; None if the prompt is not echoed."""
    if not params.echo:
        return None
    if params.echo == "ids":
        return ""
    return tokenizer.decode(ids) if text is None else text
