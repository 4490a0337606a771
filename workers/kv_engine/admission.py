"""Validation of a request before the engine queues it. Imports no torch."""

from shared.errors import BugError, ClientError
from workers.kv_engine.sequence_spec import SequenceSpec


def check_spec(spec: SequenceSpec, vocab_size: int) -> None:
    """Check that a request can be computed by a model with `vocab_size` tokens.

    Raises:
        ClientError: the client's part of the request is invalid.
        BugError: the worker built an inconsistent request.
    """
    if spec.finished is not None:
        raise BugError(f"sequence {spec.key!r} has nothing to compute: its prefix ends the answer")
    if not spec.prompt_ids:
        raise ClientError("the prompt is empty: expected at least one token", code="empty_prompt")
    if spec.scores_prompt and spec.logprobs is None:
        raise BugError(f"sequence {spec.key!r} has scores_prompt, but no logprobs: expected a number")
    if spec.max_tokens < 1 and not (spec.max_tokens == 0 and spec.has_prompt_output):
        raise ClientError(
            f"max_tokens must be at least 1, found {spec.max_tokens}", code="invalid_max_tokens"
        )
    if spec.pooling is not None and spec.max_tokens:
        raise BugError(f"sequence {spec.key!r} has pooling and max_tokens: expected one of them")
    for field, ids in spec.token_ids_by_field.items():
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            raise ClientError(
                f"{field}: token ids must be from 0 to {vocab_size - 1}, found {min(ids)} to {max(ids)}",
                code="invalid_token_id",
            )
    if len(spec.bannable_ids) >= vocab_size:
        raise ClientError(
            "bad_words and min_tokens leave no token to choose: remove some bad_words",
            code="nothing_left",
        )
