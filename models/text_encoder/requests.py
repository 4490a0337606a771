"""Requests of families that compute a result of each text: embeddings, vectors of tokens, scores. No torch.

A family's plan is `one_walk`. Its CPU node begins with `read`, then refuses by the `refuse_...` functions
what its model cannot do, and finds its texts by `texts_of`.
"""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec

from models.base import TEXT
from shared.errors import ClientError
from shared.events import Inputs, Params, Usage
from shared.plans import Finish, Plan, PlanRequest, Walk

Options = TypeVar("Options", bound=msgspec.Struct)


class TextsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a walk: the request as the client wrote it."""

    inputs: Inputs
    params: Params


def one_walk(walk: str, request: PlanRequest) -> Plan:
    """Run one walk for all texts of a request; its CPU node reports the fact `prompt_tokens`."""
    done = yield Walk(walk, args=TextsRequest(inputs=request.inputs, params=request.params))
    return Finish(usage=Usage(prompt_tokens=done.fact("prompt_tokens")), finish_reasons=("stop",))


def read(args: Mapping[str, Any], options: type[Options]) -> tuple[TextsRequest, Options]:
    """Read the arguments of a walk, and the family's options in them.

    Raises:
        ClientError: they are malformed.
    """
    try:
        request = msgspec.convert(args, TextsRequest)
        return request, msgspec.convert(request.params.options, options)
    except msgspec.ValidationError as error:
        raise ClientError(f"the request is malformed: {error}") from error


def texts_of(inputs: Inputs) -> tuple[list[str | list[int]], list[str]]:
    """The texts of a request, and their names in error messages; an empty `text` beside files is none."""
    if inputs.texts is not None:
        return list(inputs.texts), [f"texts[{index}]" for index in range(len(inputs.texts))]
    if inputs.text is not None:
        is_given = bool(inputs.text) or not inputs.files
        return ([inputs.text], ["text"]) if is_given else ([], [])
    return [inputs.token_ids or []], ["token_ids"]


def truncated_to(params: Params, longest: int) -> int | None:
    """The most tokens of a text that a request asks for; None: it leaves that to the model.

    Args:
        params: those of the request.
        longest: the most tokens that the model can take.

    Raises:
        ClientError: the request asks for more.
    """
    wanted = params.truncate_prompt_tokens
    if wanted is not None and wanted > longest:
        raise ClientError(
            f"truncate_prompt_tokens: expected at most the model's {longest} tokens, found {wanted}"
        )
    return None if wanted == -1 else wanted


def refuse_chats(inputs: Inputs, *, does: str, expected: str) -> None:
    """Refuse chats and tools.

    Args:
        inputs: those of the request.
        does: for the message, "embeds texts".
        expected: for the message, the inputs that the model takes.

    Raises:
        ClientError: the request has a chat.
    """
    if inputs.messages is not None or inputs.tools:
        raise ClientError(f"this model {does}: expected {expected}, found a chat")


def refuse_files(inputs: Inputs) -> None:
    """Refuse files, and inputs of other modalities than text.

    Raises:
        ClientError: the request has some.
    """
    if inputs.files or set(inputs.input_modalities) - {TEXT}:
        raise ClientError("this model reads text only; leave the files out", code="unsupported_modality")


def refuse_queries(inputs: Inputs, params: Params, *, does: str) -> None:
    """Refuse queries, and what is said of documents alone; `does` is that of `refuse_chats`.

    Raises:
        ClientError: the request has some.
    """
    if inputs.queries or params.max_tokens_per_doc is not None:
        raise ClientError(f"this model {does} and compares none: expected no queries")


def refuse_outputs(inputs: Inputs, outputs: Collection[str], *, makes: str) -> None:
    """Refuse output modalities besides `outputs` and the default, text; `makes` names them in the message.

    Raises:
        ClientError: the request asks for another.
    """
    if set(inputs.output_modalities) - {TEXT, *outputs}:
        raise ClientError(
            f"this model makes {makes}; asked for {inputs.output_modalities}", code="unsupported_modality"
        )


def refuse_generation(params: Params, *, result: str) -> None:
    """Refuse parameters that only an answer in text has.

    Args:
        params: those of the request.
        result: for the message, "a score is".

    Raises:
        ClientError: the request has one of them.
    """
    if params.echo or params.warm or params.logprobs is not None or params.guide is not None:
        raise ClientError(f"expected no echo, warm, logprobs or guide: {result} no answer in text")
