"""The check of the texts of a request (`Inputs.texts`), before it is admitted. Pure."""

from shared.errors import ClientError
from shared.events import Inputs


def check_texts(inputs: Inputs, *, takes_texts: bool) -> None:
    """Check that the model takes several texts, and that there is a query for each.

    Args:
        inputs: the request's inputs.
        takes_texts: the model takes several texts in a request.

    Raises:
        ClientError: it does not, there is neither a text nor a file, or the number of queries does not fit.
    """
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
