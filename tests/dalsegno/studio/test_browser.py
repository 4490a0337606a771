"""The screens in a real browser: no error, nothing foreign, hostile texts stay text, axe is content.

They need Debian's chromium (`apt-get install chromium`) and playwright, and are left out without them.
"""

import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, Self

import pytest
import uvicorn
from click.testing import CliRunner

from dalsegno.cli import main
from dalsegno.replay import recorded_request
from dalsegno.studio import server
from dalsegno.studio.access import Door
from dalsegno.studio.asking import Asker
from dalsegno.studio.recordings import BundleRecording, Shelf
from tests.dalsegno import histories
from tests.dalsegno.studio.pages import BUNDLES, HISTORIES, shelf_of
from tests.dalsegno.studio.test_asking import NotingAsker

CHROMIUM: Final = shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
)
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
]

ALTERED: Final = HISTORIES / "wrong" / "altered.bundle"
SCREENS: Final = ("request", "events", "state", "decisions")
PATIENCE_MS: Final = 15_000
DRAWN: Final = {
    "requests": "[role=grid] [aria-selected=true]",
    "request": ".timeline .tick",
    "events": ".event h2",
    "state": ".leaf",
    "decisions": ".event h2",
    "compare": ".compared",
    "cluster": ".compared h2",
    "what-if": ".compared .empty, .compared table, .compared .bad",
}
"""What a screen shows once it is complete."""
HOSTILE: Final = (
    "</script><script>document.title='broken'</script>",
    "<img src=x onerror=document.title='broken'>",
    "javascript:document.title='broken'",
    "\" onmouseover=\"document.title='broken'",
    "{{constructor.constructor('document.title=1')()}}",
    "\u202egnp.exe\u0007\u001b[2J\u0000",
)


@dataclass(slots=True)
class Served:
    """A studio on a port of its own, in a thread."""

    shelf: Shelf
    asker: Asker | None = None
    door: Door = field(init=False)
    _server: uvicorn.Server = field(init=False)
    _thread: threading.Thread = field(init=False)
    _socket: socket.socket = field(init=False)

    def __enter__(self) -> Self:
        self._socket = server.bind(0)
        self._socket.listen()
        self.door = Door(self._socket.getsockname()[1])
        app = server.application(self.shelf, self.door, asker=self.asker)
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.door.port}"


@dataclass(slots=True)
class Window:
    """A page with a session; what goes wrong in it is collected."""

    page: Any
    url: str
    wrong: list[str] = field(default_factory=list)

    def open(self, screen: str, **values: object) -> None:
        """Open a screen, and wait until it is complete."""
        query = "&".join(f"{name}={value}" for name, value in values.items())
        self.page.goto(f"{self.url}/#/{screen}?{query}")
        self.page.wait_for_selector(f"section.screen.{screen}, .failure")
        self.page.wait_for_selector(f"{DRAWN[screen]}, .failure")
        assert self.page.locator(".failure h1").count() == 0, self.page.locator(".failure").inner_text()

    def texts(self) -> str:
        return str(self.page.locator("body").inner_text())


class Opener(Protocol):
    def __call__(self, shelf: Shelf, asker: Asker | None = None) -> Window: ...


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Any) -> Iterator[Opener]:
    """Opens studios, and tells at the end what went wrong in their pages."""
    closing: list[Callable[[], object]] = []
    windows: list[Window] = []

    def open_one(shelf: Shelf, asker: Asker | None = None) -> Window:
        served = Served(shelf, asker).__enter__()
        closing.append(served.__exit__)
        context = chromium.new_context(viewport={"width": 1440, "height": 900}, accept_downloads=False)
        closing.append(context.close)
        window = Window(context.new_page(), served.url)
        windows.append(window)
        own = re.compile(rf"{re.escape(served.url)}/|data:|blob:")
        page = window.page
        page.set_default_timeout(PATIENCE_MS)
        note = window.wrong.append
        page.on("console", lambda message: note(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: note(f"error: {error}"))
        page.on("request", lambda one: None if own.match(one.url) else note(f"asked {one.url}"))
        page.on("dialog", lambda dialog: note("a dialog was opened"))
        page.goto(served.door.link())
        page.wait_for_selector(DRAWN["requests"] if shelf.bundles else "section.screen.requests")
        return window

    yield open_one
    wrong = [line for window in windows for line in window.wrong]
    for close in reversed(closing):
        close()
    assert wrong == []


def places(shelf: Shelf) -> list[tuple[str, str]]:
    """All requests of a shelf, as source and id."""
    return [(one.id, request_id) for one in shelf.bundles.values() for request_id in one.history.requests]


def test_every_history_opens_on_every_screen_without_an_error(opened: Opener) -> None:
    shelf = shelf_of(*BUNDLES, ALTERED)
    window = opened(shelf)
    assert window.page.locator("[role=row]").count() == len(places(shelf)) + 1

    for source, request_id in places(shelf):
        for screen in SCREENS:
            window.open(screen, source=source, id=request_id)
            assert request_id in window.page.locator(".subject").inner_text()
        window.open("request", source=source, id=request_id)
        window.open("state", source=source, id=request_id, at=3, field=f"{request_id}.phase")
        window.page.wait_for_selector(".past ol, .past h2")
        window.open("cluster", source=source)
        window.open("what-if", source=source, set="max_attempts=7")
        window.open(
            "compare", source=source, id=request_id, source2="b1", id2=shelf.bundles["b1"].history.requests[0]
        )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_any_screen(scheme: str, opened: Opener) -> None:
    window = opened(shelf_of(HISTORIES / "sound-worker-died.bundle", ALTERED))
    window.page.emulate_media(color_scheme=scheme)
    shown_screens: list[tuple[str, dict[str, object]]] = [
        ("requests", {}),
        *((screen, {"source": "b1", "id": "sound-worker-died", "at": 5}) for screen in SCREENS),
        ("decisions", {"source": "b2", "id": "plain"}),
        ("compare", {"source": "b2", "id": "plain", "source2": "b1", "id2": "sound-worker-died"}),
        ("cluster", {"source": "b1", "at": 22}),
        ("what-if", {"source": "b1"}),
        ("what-if", {"source": "b1", "set": "max_attempts=7"}),
        ("what-if", {"source": "b1", "set": "max_attempts=7", "level": "times"}),
    ]
    for screen, values in shown_screens:
        window.open(screen, **values)
        found = axe.Axe().run(window.page).response["violations"]
        shown = [(one["id"], [node["html"][:160] for node in one["nodes"]][:4]) for one in found]
        assert shown == [], (screen, scheme, shown)
    window.wrong.clear()  # axe itself is no script of the page


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_remains_text(text: str, opened: Opener) -> None:
    records = histories.answered(text, tenant=text[:40].replace("\u0000", ""))
    history = recorded_request.of_log(histories.collected(records))
    shelf = Shelf()
    shelf.bundles["b1"] = BundleRecording("b1", f"{text}.bundle", history)
    window = opened(shelf)

    visible = next(part for part in re.split(r"[^ -~]", text) if part)
    assert visible in window.texts()
    for screen in SCREENS:
        window.open(screen, source="b1", id="r1", at=4, seq=4)
        assert "broken" not in window.page.title()
    assert not re.search(r"[\u202e\u0007\u001b]", window.page.content())


def test_a_policy_violation_would_be_noticed(opened: Opener) -> None:
    window = opened(shelf_of(BUNDLES[0]))

    blocked = window.page.evaluate(
        """() => new Promise((done) => {
            addEventListener("securitypolicyviolation", (event) => done(event.effectiveDirective));
            const script = document.createElement("img");
            script.src = "http://example.com/x.png";
            document.body.append(script);
        })"""
    )

    assert blocked == "img-src"
    assert window.wrong
    window.wrong.clear()


def test_the_keyboard_leads_from_the_list_to_cause_effect_and_state(opened: Opener) -> None:
    window = opened(shelf_of(HISTORIES / "worker-died.bundle"))
    keys = window.page.keyboard

    keys.press("Enter")
    window.page.wait_for_selector("section.request")
    keys.press("3")
    window.page.wait_for_selector("section.events [aria-selected=true]")
    keys.press("End")
    window.page.wait_for_selector(".event h2:has-text('request.finished')")
    keys.press("c")
    window.page.wait_for_selector(".event h2:has-text('walk.completed')")
    keys.press("e")
    window.page.wait_for_selector(".event h2:has-text('request.finished')")
    keys.press("s")
    window.page.wait_for_selector("section.state")
    assert "request.finished" in window.page.locator(".where").inner_text()
    keys.press("ArrowLeft")
    window.page.wait_for_selector(".where:has-text('walk.')")
    window.page.get_by_role("button", name="phase", exact=True).click()
    window.page.wait_for_selector(".past ol")
    assert "worker.lost" in window.page.locator(".past").inner_text()


def test_an_address_holds_what_is_shown(opened: Opener) -> None:
    window = opened(shelf_of(HISTORIES / "worker-died.bundle"))
    window.open("state", source="b1", id="worker-died", at=5)
    window.page.keyboard.press("ArrowRight")
    window.page.wait_for_url("**/*at=6*")
    here = window.page.locator(".where").inner_text()

    window.page.reload()
    window.page.wait_for_selector("section.state")

    assert window.page.locator(".where").inner_text() == here


def test_the_cursor_shows_the_answer_up_to_a_time(opened: Opener) -> None:
    window = opened(shelf_of(HISTORIES / "worker-died.bundle"))
    window.open("request", source="b1", id="worker-died", at=0)
    said = window.page.locator(".said")
    assert said.inner_text() == ""

    window.page.locator(".timeline").focus()
    window.page.keyboard.press("End")

    assert window.page.locator(".unsaid").inner_text() == ""
    assert said.inner_text().startswith("The zip object")


def test_sound_can_be_played(opened: Opener) -> None:
    metadata = {"sample_rate": 16_000, "num_channels": 1}
    records = histories.answered(data=bytes(32_000), metadata=metadata, modality="audio")
    shelf = Shelf()
    history = recorded_request.of_log(histories.collected(records))
    shelf.bundles["b1"] = BundleRecording("b1", "sound", history)
    window = opened(shelf)
    window.open("request", source="b1", id="r1")

    duration = window.page.evaluate(
        """() => new Promise((done) => {
            const audio = document.querySelector("audio");
            if (audio.readyState) done(audio.duration);
            audio.addEventListener("loadedmetadata", () => done(audio.duration));
            audio.addEventListener("error", () => done(null));
        })"""
    )

    assert duration == pytest.approx(1.0)


def test_a_decision_says_what_it_was_chosen_from_or_why_that_is_not_known(opened: Opener) -> None:
    window = opened(shelf_of(HISTORIES / "plain.bundle"))
    window.open("decisions", source="b1", id="plain")
    window.page.locator("[role=row]:has-text('request.admitted')").first.click()
    window.page.get_by_role("button", name="What was it chosen from?").click()
    window.page.wait_for_selector(".alternatives .bad:has-text('open the log itself')")
    window.page.locator("[role=row]:has-text('request.finished')").first.click()
    window.page.wait_for_selector(".event h2:has-text('request.finished')")
    assert "chosen from" not in window.texts()


def test_a_dialog_says_what_will_be_asked_before_it_is_asked(opened: Opener) -> None:
    asker = NotingAsker()
    window = opened(shelf_of(HISTORIES / "plain.bundle"), asker)
    page = window.page
    window.open("request", source="b1", id="plain")
    page.get_by_role("button", name="Ask again").click()
    page.wait_for_selector(".preview:has-text('Nothing else is changed')")
    page.locator("dialog.fork textarea").fill('temperature=0.7\ntext="<img src=x>"')
    page.wait_for_selector(".preview td:has-text('params.temperature')")
    assert "<img src=x>" in page.locator(".preview").inner_text()
    page.locator("dialog.fork textarea").fill("temprature=1")
    page.wait_for_selector(".preview .bad:has-text('no such key')")
    assert page.get_by_role("button", name="Ask the running deployment").is_disabled()
    assert asker.asked == []
    assert axe.Axe().run(page).response["violations"] == []

    page.locator("dialog.fork textarea").fill("temperature=0.7")
    page.wait_for_selector(".preview td:has-text('params.temperature')")
    page.get_by_role("button", name="Ask the running deployment").click()

    page.wait_for_url("**/*source=log*")
    [event] = asker.asked
    assert event.params.temperature == 0.7
    page.wait_for_selector(".failure")  # there is no log here with the new request
    window.wrong.clear()


def test_a_request_can_be_asked_again_from_any_of_its_events(opened: Opener) -> None:
    window = opened(shelf_of(HISTORIES / "plain.bundle"), NotingAsker())
    window.open("events", source="b1", id="plain")
    row = window.page.locator("[role=row]:has-text('request.admitted') .seq").first
    place = row.inner_text()
    row.click()
    window.page.get_by_role("link", name="ask again from here").click()
    window.page.wait_for_selector("dialog.fork[open]")
    assert window.page.locator("dialog.fork input").input_value() == place
    window.page.wait_for_selector(".preview:has-text('Nothing else is changed')")


def test_without_permission_no_page_offers_to_ask(opened: Opener) -> None:
    window = opened(shelf_of(HISTORIES / "plain.bundle"))
    for screen in ("request", "events"):
        window.open(screen, source="b1", id="plain")
        assert "sk again" not in window.texts()


def test_a_bundle_is_opened_by_dropping_it(opened: Opener) -> None:
    window = opened(Shelf())
    path = Path(HISTORIES / "plain.bundle")

    window.page.locator("input[type=file]").set_input_files(path)

    window.page.wait_for_selector("section.request")
    assert "plain" in window.page.locator("h1").inner_text()


def test_an_exported_file_shows_all_screens_without_a_server(chromium: Any, tmp_path: Path) -> None:
    file = tmp_path / "all.html"
    paths = [str(HISTORIES / f"{name}.bundle") for name in ("worker-died", "choices")]
    with ThreadPoolExecutor() as pool:  # playwright runs an event loop in this thread
        done = pool.submit(CliRunner().invoke, main, ["studio", *paths, "--export", str(file)])
        assert done.result().exit_code == 0
    context = chromium.new_context(offline=True)
    window = Window(context.new_page(), "")
    window.page.set_default_timeout(PATIENCE_MS)
    window.page.on("console", lambda message: window.wrong.append(message.text))
    window.page.on("pageerror", lambda error: window.wrong.append(str(error)))
    window.page.on("request", lambda one: window.wrong.append(one.url))

    window.page.goto(file.as_uri())
    window.page.wait_for_selector(DRAWN["requests"])
    asked = [url for url in window.wrong if url != file.as_uri() and not url.startswith("data:")]
    window.wrong.clear()
    for screen in SCREENS:
        window.page.evaluate("(hash) => { location.hash = hash; }", f"#/{screen}?source=b1&id=worker-died")
        window.page.wait_for_selector(DRAWN[screen])
    window.page.evaluate(
        "() => { location.hash = '#/state?source=b1&id=worker-died&field=worker-died.phase'; }"
    )
    window.page.wait_for_selector(".past ol")

    assert asked == []
    assert window.wrong == []
    context.close()
