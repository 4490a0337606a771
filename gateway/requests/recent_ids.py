"""Which requests there were: the ids that this gateway saw pass, of all gateways, newest last.

The log forgets a request; whoever asks for it after that is told "gone" and not "never heard of" as long as
somebody remembers. Bounded: of many requests a day, only the last are known.
"""

from typing import Final

MOST: Final = 100_000
"""Some 15 MB."""


class Passed:
    """The ids of the last `MOST` requests about which something was decided."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}

    def add(self, request_id: str) -> None:
        """Something was decided about a request."""
        self._ids[request_id] = None
        if len(self._ids) > MOST:
            del self._ids[next(iter(self._ids))]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids
