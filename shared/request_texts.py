"""The check of the texts of a request (`Inputs.texts`), before it is admitted. Pure."""

from collections.abc import Sequence
from typing import Final

from shared.errors import ClientError
from shared.events import Inputs, Params

_TRUNCATION: Final = ("truncate_prompt_tokens", "truncation_side", "max_tokens_per_doc")


def check_texts(inputs: Inputs, params: Params, *, takes_texts: bool, truncates: bool) -> None:
    """Check that the model takes several texts, and that there is a query for each.

    Args:
        inputs: the request's inputs.
        params: its parameters.
        takes_texts: the model takes several texts in a request.
        truncates: the model truncates what this request gives it.

    Raises:
        ClientError: it does not, there is neither a text nor a file, or the number of queries does not fit.
    """
    if not truncates:
        _check_no_truncation(params, _TRUNCATION)
    elif not inputs.queries:
        _check_no_truncation(params, ("max_tokens_per_doc",))
    if inputs.texts is None:
        return
    if not takes_texts:
        raise ClientError(
            "texts: this model takes one text in a request; send a request with text for each of them",
            code="texts_not_supported",
        )
    entries = len(inputs.texts) + len(inputs.files)
    if not entries:
        raise ClientError("texts: expected at least one text or file, found none")
    if len(inputs.queries) not in {0, 1, entries}:
        wanted = (
            "none or one" if entries == 1 else f"none, one, or one for each of the {entries} texts and files"
        )
        raise ClientError(f"queries: expected {wanted}, found {len(inputs.queries)}")


def _check_no_truncation(params: Params, names: Sequence[str]) -> None:
    for name in names:
        if getattr(params, name) is not None:
            raise ClientError(
                f"{name}: this model does not truncate such a prompt; leave it out, and shorten the prompt",
                code="not_supported",
            )
