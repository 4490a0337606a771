"""The picture in docs/http.md shows the page as it is: `make screenshots` draws it.

Like the studio's (`tests.dalsegno.studio.test_screenshots`), it keeps the digest of the page's files.
"""

import hashlib
from pathlib import Path
from typing import Final

from gateway.page.routes import STATIC, page_files
from tests.gateway.page.test_browser import opened, pytestmark
from tests.gateway.world import Performance
from tests.pictures import draws, is_drawn_from, keep

__all__ = ["pytestmark"]
PICTURE: Final = Path(__file__).parents[3] / "docs" / "images" / "page.png"
SIZE: Final = {"width": 1280, "height": 640}
ANSWER: Final = (
    "Return the number of items in a container:\n\n```python\nlen([3, 1, 2])  # 3\n```\n\n"
    "For a *dictionary* these are its keys."
)


async def script(performance: Performance) -> None:
    for piece in ANSWER.split(" "):
        performance.say(f"{piece} ")
    performance.finish()


def digest() -> str:
    """The digest of what the picture is drawn from."""
    found = hashlib.sha256(ANSWER.encode())
    for path in page_files():
        found.update(path.relative_to(STATIC).as_posix().encode() + path.read_bytes())
    return found.hexdigest()


async def test_the_picture_shows_the_page_as_it_is() -> None:
    async with opened(script) as (_, window):
        await window.page.set_viewport_size(SIZE)
        # A gateway alone, without a conductor, is not ready.
        await window.page.route("**/health", lambda route: route.fulfill(json={"status": "healthy"}))
        await window.page.reload()
        await window.ask("What does len do?")
        await window.page.locator(".way p", has_text="finished after").wait_for()
        if draws():
            await window.page.screenshot(path=PICTURE)
            keep(PICTURE, digest())
    is_drawn_from(PICTURE, (SIZE["width"], SIZE["height"]), digest())
