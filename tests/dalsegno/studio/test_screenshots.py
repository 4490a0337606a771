"""The pictures in docs/studio.md show the screens as they are: `make screenshots` draws them.

A picture keeps the digest of the pages' files and of the history that it shows (`tests.pictures`).
"""

import hashlib
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from dalsegno.studio import server
from tests.dalsegno.studio.pages import HISTORIES, shelf_of
from tests.dalsegno.studio.test_browser import ALTERED, CHROMIUM, Opener, chromium, opened
from tests.pictures import draws, is_drawn_from, keep

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
]
__all__ = ["chromium", "opened"]

DOCS: Final = Path(__file__).parents[3] / "docs"
PICTURES: Final = DOCS / "images"
SIZE: Final = {"width": 1280, "height": 720}


class Picture(NamedTuple):
    """A screen of a recorded history."""

    history: Path
    screen: str
    values: dict[str, Any]

    @property
    def file(self) -> Path:
        return PICTURES / f"studio-{self.screen}.png"

    @property
    def digest(self) -> str:
        """The digest of what it is drawn from."""
        found = hashlib.sha256(self.history.read_bytes())
        for name in server.static_files():
            found.update((server.STATIC / name).read_bytes())
        return found.hexdigest()


TAKEN: Final = [
    Picture(HISTORIES / "sound-worker-died.bundle", "request", {"at": 1.4}),
    Picture(HISTORIES / "worker-died.bundle", "state", {"at": 12, "field": "worker-died.phase"}),
    Picture(ALTERED, "decisions", {}),
]


@pytest.mark.parametrize("picture", TAKEN, ids=lambda picture: picture.screen)
def test_a_picture_shows_its_screen_as_it_is(picture: Picture, opened: Opener) -> None:
    shelf = shelf_of(picture.history)
    window = opened(shelf)
    window.page.set_viewport_size(SIZE)
    request_id = shelf.bundles["b1"].history.requests[0]
    window.open(picture.screen, source="b1", id=request_id, **picture.values)
    if "field" in picture.values:
        window.page.wait_for_selector(".past ol")
    if draws():
        picture.file.parent.mkdir(exist_ok=True)
        window.page.screenshot(path=picture.file)
        keep(picture.file, picture.digest)
    is_drawn_from(picture.file, (SIZE["width"], SIZE["height"]), picture.digest)


def test_each_picture_is_on_the_page_and_each_one_there_is_drawn() -> None:
    page = (DOCS / "studio.md").read_text(encoding="utf-8")
    assert {one.file.name for one in TAKEN} == {file.name for file in PICTURES.glob("studio-*.png")}
    for one in TAKEN:
        assert f"](images/{one.file.name})" in page
