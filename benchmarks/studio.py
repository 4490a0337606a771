"""Speed of the studio's pages in Debian's chromium, on a request with 100,000 events.

    first paint   from the click on a link to the first picture with contents, of a process that has just
                  started to serve; and to the list
    scrolling     time of a frame while the list of 100,000 events is scrolled from end to end in 240 frames,
                  and the part of it in which the page's main thread works
    slider step   from a key to the state after the next record, drawn
    size          of everything that is loaded before data

Without chromium or playwright it says so and measures nothing.
"""

import shutil
import socket
import statistics
import threading
import time
from typing import Any, Final

import uvicorn

from benchmarks import histories
from benchmarks.hop import SUBJECTS
from benchmarks.report import Figure
from conductor.deployment import deployment_of
from configs.checks import resolve
from dalsegno.replay.recorded_request import History
from dalsegno.studio import server
from dalsegno.studio.access import Door
from dalsegno.studio.recordings import BundleRecording, Shelf

EVENTS: Final = 100_000
STEPS: Final = 60
REQUEST: Final = "request-000000"
_ROWS_DRAWN: Final = "[role=grid] [role=row][aria-selected]"
_SCROLL: Final = """() => new Promise((done) => {
    const view = document.querySelector("[role=grid]");
    const frames = [];
    let before = performance.now();
    let left = 240;
    const step = () => {
        const now = performance.now();
        frames.push(now - before);
        before = now;
        view.scrollTop += view.scrollHeight / 240;
        if (--left) requestAnimationFrame(step); else done(frames.slice(2));
    };
    requestAnimationFrame(step);
})"""
_STEP: Final = """() => new Promise((done) => {
    const where = document.querySelector(".where b");
    const begun = performance.now();
    new MutationObserver((_, seen) => {
        seen.disconnect();
        requestAnimationFrame(() => done(performance.now() - begun));
    }).observe(document.querySelector(".where"), { childList: true });
    const key = new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true });
    document.querySelector(".slider").dispatchEvent(key);
})"""
_PAINT: Final = """() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? 0"""


def measure() -> list[Figure]:
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright  # noqa: PLC0415 # it is not needed for others
    except ModuleNotFoundError:
        chromium = None
    if chromium is None:
        print("studio: nothing is measured; it needs `apt-get install chromium` and `pip install playwright`")
        return []
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            return _measured(browser)
        finally:
            browser.close()


def _measured(browser: Any) -> list[Figure]:
    shelf = Shelf()
    shelf.bundles["b1"] = BundleRecording("b1", "long", _history())
    bound = server.bind(0)
    bound.listen()
    door = Door(bound.getsockname()[1])
    serving = uvicorn.Server(
        uvicorn.Config(server.application(shelf, door), log_level="error", lifespan="off")
    )
    thread = threading.Thread(target=serving.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        return _of_pages(browser, door, bound)
    finally:
        serving.should_exit = True
        thread.join()


def _of_pages(browser: Any, door: Door, bound: socket.socket) -> list[Figure]:
    base = f"http://127.0.0.1:{door.port}"
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(300_000)
    sizes: list[int] = []
    page.on("response", lambda answer: sizes.append(_size_of(answer)))
    begun_s = time.perf_counter()
    page.goto(door.link())
    page.wait_for_selector(_ROWS_DRAWN)
    listed_s = time.perf_counter() - begun_s
    paint_s = page.evaluate(_PAINT) / 1e3

    begun_s = time.perf_counter()
    page.goto(f"{base}/#/events?source=b1&id={REQUEST}")
    page.wait_for_selector(".event h2")
    events_s = time.perf_counter() - begun_s
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    before_s = _main_thread_s(session)
    frames_ms = page.evaluate(_SCROLL)
    work_ms = 1e3 * (_main_thread_s(session) - before_s) / len(frames_ms)
    session.detach()

    page.goto(f"{base}/#/state?source=b1&id={REQUEST}&at={EVENTS // 2}")
    page.wait_for_selector(".leaf")
    steps_ms = [page.evaluate(_STEP) for _ in range(STEPS)]

    begun_s = time.perf_counter()
    page.goto(f"{base}/#/request?source=b1&id={REQUEST}")
    page.wait_for_selector(".timeline .tick")
    request_s = time.perf_counter() - begun_s
    return [
        Figure("first paint", paint_s, "s", "goal below 1"),
        Figure("from the link to the list of requests", listed_s, "s"),
        Figure(
            "scrolling events: frame, 95th percentile",
            _p95(frames_ms),
            "ms",
            f"goal below 16.7; median {statistics.median(frames_ms):.1f}",
        ),
        Figure("scrolling events: work of the main thread per frame", work_ms, "ms", "script, style, layout"),
        Figure(
            "step of the slider, median",
            statistics.median(steps_ms),
            "ms",
            f"goal below 50; 95th percentile {_p95(steps_ms):.1f}",
        ),
        Figure("loaded before data", sum(sizes) / 1e3, "kB", "goal below 120"),
        Figure("first look at the events, which are decided again", events_s, "s", f"{EVENTS:,} events"),
        Figure("first look at the timeline", request_s, "s", f"{EVENTS:,} events"),
    ]


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def _history() -> History:
    deployment = deployment_of(resolve("demo"), max_event_bytes=1 << 20)
    records = histories.make(1, deployment, SUBJECTS, chunks=EVENTS - 8)
    return History(source="long", requests=[REQUEST], records=records, subjects=SUBJECTS)


def _main_thread_s(session: Any) -> float:
    """Seconds that the page's main thread has worked since its beginning."""
    found = session.send("Performance.getMetrics")["metrics"]
    return next(float(one["value"]) for one in found if one["name"] == "TaskDuration")


def _size_of(answer: Any) -> int:
    """The bytes of a file of the pages; none of data and of redirections."""
    return len(answer.body()) if answer.ok and "/api/" not in answer.url else 0
