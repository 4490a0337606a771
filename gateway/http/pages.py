"""Pages of lists, as OpenAI's clients ask for them."""

from typing import Any, Final

from gateway.errors import InvalidParamError
from shared.validation_errors import described

MOST_LISTED: Final = 100


def check_page(limit: int, order: str, most: int = MOST_LISTED) -> None:
    """Check the parameters of a page.

    Raises:
        InvalidParamError: `limit` is not from 1 to `most`, or `order` neither `asc` nor `desc`.
    """
    if not 1 <= limit <= most:
        raise InvalidParamError("limit", f"limit: expected an integer from 1 to {most}, found {limit}")
    if order not in ("asc", "desc"):
        raise InvalidParamError("order", f"order: expected asc or desc, found {described(order)}")


def page_document(data: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """The document of a page with these objects."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def item_page(items: list[dict[str, Any]], limit: int, order: str, after: str) -> dict[str, Any]:
    """A page of items, which are given in the order `asc`.

    Raises:
        InvalidParamError: a parameter is wrong, or there is no item `after`.
    """
    check_page(limit, order)
    items = items if order == "asc" else items[::-1]
    if after:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidParamError("after", f"after: expected the id of an item, found {after!r:.80}")
        items = items[ids.index(after) + 1 :]
    return page_document(items[:limit], has_more=len(items) > limit)
