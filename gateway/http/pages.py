"""Pages of lists, as OpenAI's clients ask for them."""

from typing import Any, Final

from gateway.errors import InvalidParamError

MOST_LISTED: Final = 100


def item_page(items: list[dict[str, Any]], limit: int, order: str, after: str) -> dict[str, Any]:
    """A page of items, which are given in the order `asc`.

    Raises:
        InvalidParamError: a parameter is wrong, or there is no item `after`.
    """
    if not 1 <= limit <= MOST_LISTED:
        raise InvalidParamError("limit", f"limit: expected an integer from 1 to {MOST_LISTED}, found {limit}")
    if order not in ("asc", "desc"):
        raise InvalidParamError("order", f"order: expected asc or desc, found {order!r:.80}")
    items = items if order == "asc" else items[::-1]
    if after:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidParamError("after", f"after: expected the id of an item, found {after!r:.80}")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }
