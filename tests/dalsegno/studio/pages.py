"""A studio for tests: its application, and a client with a session, without a process or a network."""

from pathlib import Path
from typing import Any

import httpx

from dalsegno.studio.access import MARK, Door
from dalsegno.studio.asking import Asker
from dalsegno.studio.recordings import Shelf
from dalsegno.studio.server import application

HISTORIES = Path(__file__).parents[2] / "histories"
BUNDLES = sorted(HISTORIES.glob("*.bundle"))
PORT = 8123
ORIGIN = f"http://127.0.0.1:{PORT}"
CHANGE = {"origin": ORIGIN, MARK: "1"}


def shelf_of(*paths: Path) -> Shelf:
    """A shelf with bundles."""
    shelf = Shelf()
    for path in paths:
        shelf.add_file(path)
    return shelf


class Visitor:
    """A browser, as far as headers and cookies go."""

    def __init__(self, shelf: Shelf, asker: Asker | None = None) -> None:
        self.door = Door(PORT)
        transport = httpx.ASGITransport(app=application(shelf, self.door, asker=asker))
        self.http = httpx.AsyncClient(transport=transport, base_url=ORIGIN)

    async def enter(self) -> httpx.Response:
        """Use a new link."""
        return await self.http.get(self.door.link())

    async def get(self, path: str, **query: Any) -> Any:
        """Return the JSON values of an answer."""
        answer = await self.http.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()


async def visitor(*paths: Path, asker: Asker | None = None) -> Visitor:
    """A visitor with a session, of a studio with bundles."""
    found = Visitor(shelf_of(*paths), asker)
    await found.enter()
    return found
