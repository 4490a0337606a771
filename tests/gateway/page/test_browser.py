"""The page in a real browser, on a gateway whose model is a script.

They need Debian's chromium (`apt-get install chromium`) and playwright, and are left out without them.
"""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest

from configs.secrets import ApiKey
from shared.events import Failure, RequestSubmitted
from tests.chaos.proxy import Proxy
from tests.gateway.media.world import SEES, png
from tests.gateway.world import SERVED, Performance, Script, World, deployment, echo, listening

CHROMIUM: Final = shutil.which("chromium")
playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
axe = pytest.importorskip(
    "axe_playwright_python.async_playwright", reason="axe-playwright-python is not installed"
)
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
]
PATIENCE_MS: Final = 15_000
DONE: Final = "article.answer:not([aria-busy])"
SPEAKER: Final = replace(
    SERVED, outputs=("text", "audio"), media={"audio": {"sample_rate": 24_000, "num_channels": 1}}
)
PAINTER: Final = replace(SERVED, outputs=("image",), family="diffusion_pipelines")
HOSTILE: Final = (
    "<script>document.title='broken'</script>",
    "<img src=x onerror=\"document.title='broken'\">",
    "[a](javascript:document.title='broken')",
    "<svg onload=\"document.title='broken'\"></svg><iframe src='//evil.example'></iframe>",
    '<style>body{display:none}</style><form action="//evil.example"><input name="x"></form>',
    "![x](https://evil.example/x.png)",
)


@dataclass(slots=True)
class Window:
    """A page, and a proxy that may be between it and its gateway; what goes wrong in it is collected."""

    page: Any
    proxy: Proxy
    wrong: list[str] = field(default_factory=list)

    async def ask(self, text: str, number: int = 0) -> Any:
        """Type a message, press Enter, and wait for its answer, counted from 0."""
        await self.page.fill("#prompt", text)
        await self.page.press("#prompt", "Enter")
        answer = self.page.locator(DONE).nth(number)
        try:
            await answer.wait_for()
        except playwright.Error as error:
            raise AssertionError(f"{self.wrong}: {await self.page.locator('body').inner_text()}") from error
        return answer


@asynccontextmanager
async def opened(
    script: Script = echo, keys: tuple[ApiKey, ...] = (), *, is_proxied: bool = False, **how: Any
) -> AsyncIterator[tuple[World, Window]]:
    """A gateway with the page open in a browser, in which nothing went wrong at the end."""
    async with (
        deployment(script, keys=keys, **how) as world,
        listening(world, keys) as own_url,
        Proxy(urlsplit(own_url).port or 0) as proxy,
        playwright.async_playwright() as started,
    ):
        browser = await started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(PATIENCE_MS)
        url = f"http://127.0.0.1:{proxy.port}" if is_proxied else own_url
        window = Window(page, proxy)
        own = re.compile(rf"{re.escape(url)}/|data:|blob:")
        note = window.wrong.append
        page.on("console", lambda message: note(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: note(f"error: {error}"))
        page.on("request", lambda one: None if own.match(one.url) else note(f"asked {one.url}"))
        page.on("dialog", lambda dialog: note("a dialog was opened"))
        await page.goto(url)
        try:
            yield world, window
        finally:
            await browser.close()
    assert window.wrong == []


def submitted(world: World) -> list[RequestSubmitted]:
    return [event for event in world.events("request") if isinstance(event, RequestSubmitted)]


async def test_a_chat_goes_on_with_what_was_said() -> None:
    async with opened() as (world, window):
        await window.page.get_by_role("heading", name="demo").wait_for()
        first = await (await window.ask("**one** two")).inner_text()
        second = await (await window.ask("three", 1)).inner_text()
        bold = await window.page.locator(f"{DONE} strong").count()
        await window.page.get_by_role("button", name="New chat").click()
        await window.ask("four")

    assert (first, second) == ("one two", "three")
    assert bold == 1
    assert [one.inputs.messages for one in submitted(world)] == [
        [{"role": "user", "content": "**one** two"}],
        [
            {"role": "user", "content": "**one** two"},
            {"role": "assistant", "content": "**one** two"},
            {"role": "user", "content": "three"},
        ],
        [{"role": "user", "content": "four"}],
    ]


async def test_tokens_are_seen_as_they_arrive_and_escape_stops_the_answer() -> None:
    arrived = asyncio.Event()

    async def script(performance: Performance) -> None:
        performance.say("seen ", [7])
        await arrived.wait()
        performance.say("early", [8, 9])
        await performance.cancelled.wait()

    async with opened(script) as (world, window):
        page = window.page
        await page.fill("#prompt", "x")
        await page.press("#prompt", "Enter")
        await page.locator(".tokens span", has_text="seen").wait_for()
        arrived.set()
        last = page.locator(".tokens span", has_text="early")
        await last.wait_for()
        assert await last.get_attribute("title") == "token 8, 9"
        assert await page.get_by_role("button", name="Stop").is_visible()
        await page.keyboard.press("Escape")
        await page.locator(DONE).wait_for()
        text = await page.locator(DONE).inner_text()
        performance = await world.performance()
        await performance.cancelled.wait()
        assert await page.get_by_role("button", name="Send").is_visible()

    assert "seen early" in text
    assert "Stopped." in text


async def test_an_answer_goes_on_after_its_connection_broke() -> None:
    go_on = asyncio.Event()

    async def script(performance: Performance) -> None:
        performance.say("before ", [7])
        await go_on.wait()
        performance.say("after", [8])
        performance.finish()

    async with opened(script, is_proxied=True) as (world, window):
        page = window.page
        await page.fill("#prompt", "x")
        await page.press("#prompt", "Enter")
        await page.locator(".tokens span", has_text="before").wait_for()
        window.proxy.cut()
        notice = page.get_by_role("alert").filter(has_text="The connection broke")
        await notice.wait_for()
        go_on.set()
        window.proxy.heal()
        await page.locator(DONE).wait_for()
        text = await page.locator(DONE).inner_text()
        told = await notice.count()
        events = submitted(world)
        window.wrong = [one for one in window.wrong if "ERR_" not in one]  # the browser tells of it, too

    assert text == "before after"
    assert told == 0
    assert len(events) == len(world.performances) == 1
    assert not any(one.cancelled.is_set() for one in world.performances.values())


async def test_the_way_of_a_request_is_shown_with_the_commands_that_take_it_apart() -> None:
    async with opened() as (world, window):
        await window.ask("one two three")
        await window.page.locator(".way p", has_text="finished after").wait_for()
        panel = await window.page.locator("#request").inner_text()
        [event] = submitted(world)

    assert "waits for admission" in panel
    assert "answer in 3 chunks" in panel
    assert f"dalsegno why {event.request_id}" in panel
    assert "7 tokens" in panel  # of the prompt


async def test_settings_are_sent() -> None:
    async with opened() as (world, window):
        page = window.page
        await page.get_by_text("Settings").click()
        await page.get_by_label("System prompt").fill("Be brief.")
        await page.get_by_label("Longest answer").fill("5")
        await page.get_by_label("Temperature").fill("0.5")
        await page.get_by_label("Seed").fill("7")
        await window.ask("x")
        await page.get_by_label("Send as").select_option("text")
        await window.ask("y", 1)
        first, second = submitted(world)

    assert first.inputs.messages == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"},
    ]  # fmt: skip
    assert (first.params.max_tokens, first.params.temperature, first.params.seed) == (5, 0.5, 7)
    assert (second.inputs.text, second.inputs.messages) == ("y", None)


async def test_reasoning_is_folded_away_and_left_out_of_the_next_turn() -> None:
    async def script(performance: Performance) -> None:
        performance.say("<think>\nlet me see\n</think>\n\nthe answer")
        performance.finish()

    async with opened(script, reasoning="think") as (world, window):
        answer = await window.ask("x")
        shown = await answer.locator(".text").inner_text()
        await answer.get_by_text("Reasoning").click()
        thought = await answer.locator(".thought").inner_text()
        await window.ask("y", 1)
        messages = submitted(world)[1].inputs.messages

    assert shown == "the answer"
    assert "let me see" in thought
    assert messages is not None
    assert messages[1] == {"role": "assistant", "content": "the answer"}


async def test_files_are_stored_and_sent_in_their_message(tmp_path: Path) -> None:
    picture = tmp_path / "red.png"
    picture.write_bytes(png())
    wrong = tmp_path / "letter.txt"
    wrong.write_text("dear")

    async def script(performance: Performance) -> None:
        performance.say(" ".join(file.modality for file in performance.event.inputs.files))
        performance.finish()

    async with opened(script, served=SEES) as (world, window):
        page = window.page
        await page.get_by_role("heading", name=SEES.name).wait_for()
        await page.set_input_files("#files", [picture, wrong])
        await page.get_by_role("alert").filter(has_text="letter.txt").wait_for()
        assert await page.locator("#attached li").count() == 1
        answer = await (await window.ask("What is it?")).inner_text()
        await window.ask("And now?", 1)
        files = [[file.content_type for file in one.inputs.files] for one in submitted(world)]
        window.wrong = [one for one in window.wrong if "400 (Bad Request)" not in one]  # the letter

    assert answer == "image"
    assert files == [["image/png"], ["image/png"]]  # the chat still has it


async def test_sound_is_played_and_can_be_played_again() -> None:
    async def script(performance: Performance) -> None:
        performance.sound(b"\0\1" * 12_000)
        performance.sound(b"\0\1" * 12_000)
        performance.finish()

    async with opened(script, served=SPEAKER) as (world, window):
        page = window.page
        await page.get_by_text("Settings").click()
        await page.get_by_label("Answer in").select_option("audio")
        await window.ask("say something")
        player = page.locator("audio")
        await player.wait_for()
        seconds = await page.evaluate(
            "(one) => one.duration || new Promise((done) => one.onloadedmetadata = () => done(one.duration))",
            await player.element_handle(),
        )
        modalities = submitted(world)[0].inputs.output_modalities

    assert modalities == ["audio"]
    assert seconds == pytest.approx(1.0)


async def test_an_image_is_shown_behind_its_progress() -> None:
    go_on = asyncio.Event()

    async def script(performance: Performance) -> None:
        step = {"node": "denoiser", "progress": {"step": 3, "steps": 8}}
        performance.value("progress", b"", step, advisory=True)
        await go_on.wait()
        performance.value("image", png(), {"content_type": "image/png", "shape": [70], "dtype": "uint8"})
        performance.finish()

    async with opened(script, served=PAINTER) as (_, window):
        page = window.page
        await page.fill("#prompt", "a red dot")
        await page.press("#prompt", "Enter")
        await page.get_by_text("denoiser: step 3 of 8").wait_for()
        go_on.set()
        image = page.get_by_role("img", name="The image that the model made")
        await image.wait_for()
        width = await page.evaluate("(one) => one.naturalWidth", await image.element_handle())

    assert width == 1


async def test_a_failure_is_told_and_is_no_part_of_the_chat() -> None:
    async def script(performance: Performance) -> None:
        if len(performance.event.inputs.messages or []) == 1 and not said:
            said.append("x")
            performance.say("half ")
            performance.fail(Failure(code="worker_crashed", message="the worker crashed", status=500))
        else:
            await echo(performance)

    said: list[str] = []
    async with opened(script) as (world, window):
        await window.ask("x")
        alert = await window.page.get_by_role("alert").filter(has_text="crashed").inner_text()
        await window.ask("y", 1)
        messages = submitted(world)[1].inputs.messages

    assert alert == "the worker crashed"
    assert messages == [{"role": "user", "content": "y"}]


async def test_a_key_is_asked_for_and_stays_in_the_tab() -> None:
    key = ApiKey(name="anna", secret="a" * 20)
    async with opened(keys=(key,)) as (world, window):
        page = window.page
        field_ = page.get_by_label("API key")
        await field_.wait_for()
        assert await page.locator("#model").inner_text() == "needs an API key"
        await field_.fill(key.secret)
        await field_.press("Tab")
        await page.get_by_role("heading", name="demo").wait_for()
        await window.ask("x")
        [event] = submitted(world)
        stored = await page.evaluate("Object.keys(localStorage).length")
        window.wrong.clear()  # the 401 before the key

    assert event.tenant == "anna"
    assert stored == 0


@pytest.mark.parametrize("text", HOSTILE)
async def test_what_a_model_writes_is_no_script_and_loads_nothing(text: str) -> None:
    async def script(performance: Performance) -> None:
        performance.say(text)
        performance.say("\n\nthe end")
        performance.finish()

    async with opened(script) as (_, window):
        answer = await window.ask(text)
        await answer.locator(".text").get_by_text("the end").wait_for()
        title = await window.page.title()
        foreign = await answer.locator(
            ".text :is(script, img, svg, iframe, style, form, input), .text a[href^=javascript]"
        ).count()
        visible = await window.page.locator("#prompt").is_visible()

    assert "broken" not in title
    assert foreign == 0
    assert visible


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing(scheme: str) -> None:
    async def script(performance: Performance) -> None:
        performance.say(
            "<think>\nhm\n</think>\n\n# A title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```\ncode\n```\n"
        )
        performance.finish()

    async with opened(script, reasoning="think", served=replace(SEES, outputs=("text", "audio"))) as (
        _,
        window,
    ):
        page = window.page
        await page.emulate_media(color_scheme=scheme)
        await page.get_by_role("heading", name=SEES.name).wait_for()
        found = [await _violations(page)]
        await page.set_input_files("#files", [{"name": "a.png", "mimeType": "image/png", "buffer": png()}])
        await page.locator("#attached li").wait_for()
        found.append(await _violations(page))
        await page.get_by_text("Settings").click()
        await window.ask("x")
        await page.locator(".way p", has_text="finished after").wait_for()
        await page.get_by_label("Show tokens").check()
        found.append(await _violations(page))
        await page.set_viewport_size({"width": 400, "height": 800})
        found.append(await _violations(page))
        window.wrong.clear()  # axe itself is no script of the page

    assert found == [[]] * 4


async def _violations(page: Any) -> list[Any]:
    found = (await axe.Axe().run(page)).response["violations"]
    return [(one["id"], [node["html"][:160] for node in one["nodes"]][:4]) for one in found]


async def test_the_keyboard_is_enough() -> None:
    async with opened() as (_, window):
        page = window.page
        await page.get_by_role("heading", name="demo").wait_for()
        await page.keyboard.type("one")
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("two")
        await page.keyboard.press("Enter")
        await page.locator(DONE).wait_for()
        mine = await page.locator(".mine").inner_text()
        reached = []
        for _ in range(14):
            await page.keyboard.press("Tab")
            reached.append(
                await page.evaluate(
                    "document.activeElement.textContent.slice(0, 20) || document.activeElement.id"
                )
            )

    assert mine == "one\ntwo"
    assert {"Send", "Settings", "Copy"} <= set(reached), reached


async def test_a_policy_violation_would_be_noticed() -> None:
    async with opened() as (_, window):
        await window.page.get_by_role("heading", name="demo").wait_for()
        blocked = await window.page.evaluate(
            """() => new Promise((done) => {
                addEventListener("securitypolicyviolation", (event) => done(event.effectiveDirective));
                const image = document.createElement("img");
                image.src = "http://evil.example/x.png";
                document.body.append(image);
            })"""
        )
        assert window.wrong
        window.wrong.clear()

    assert blocked == "img-src"
