"""`/` and `/page/*`: the page for browsers, JSON for programs, and who needs a key."""

import re

import pytest

from configs.deployment import GatewaySettings
from configs.secrets import ApiKey
from gateway.page.routes import POLICY, STATIC, page_files
from tests.gateway.world import CHAT, deployment

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
KEYS = [ApiKey(name="anna", secret="a" * 20)]


async def test_a_browser_gets_the_page_and_a_program_gets_json() -> None:
    async with deployment() as world:
        page = await world.client.get("/", headers=BROWSER)
        programs = [
            await world.client.get("/", headers=headers) for headers in ({}, {"accept": "application/json"})
        ]

    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"] == POLICY
    assert page.headers["vary"] == "accept"
    assert page.content == (STATIC / "index.html").read_bytes()
    for response in programs:
        assert response.json()["name"] == "dalsegno"
        assert response.headers["content-security-policy"].startswith("default-src 'none'; frame")


async def test_every_file_of_the_page_is_served_with_its_type_and_nothing_else_is() -> None:
    types = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
    async with deployment() as world:
        for path in page_files():
            response = await world.client.get(f"/page/{path.relative_to(STATIC).as_posix()}")
            assert response.status_code == 200
            assert response.headers["content-type"].partition(";")[0] == types[path.suffix]
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.content == path.read_bytes()
        others = [
            (await world.client.get(path)).status_code
            for path in ("/page/", "/page/none.js", "/page/../routes.py", "/page/vendor/marked.LICENSE")
        ]

    assert others == [404] * 4


def test_every_file_that_the_page_names_is_there_and_none_is_elsewhere() -> None:
    served = {f"/page/{path.relative_to(STATIC).as_posix()}" for path in page_files()}
    own = [path for path in page_files() if path.parent == STATIC]
    named = set()
    for path in own:
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r'(?:src|href)="(/page/[^"]+)"', text))
        for found in re.findall(r'from "(\./[^"]+)"', text):
            named.add(f"/page/{found.removeprefix('./')}")
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path.name
        assert not re.search(r"innerHTML|outerHTML|document\.write|\beval\(", text), path.name

    assert named | {"/page/index.html"} == served


async def test_the_page_needs_no_key_and_everything_else_does() -> None:
    async with deployment(keys=KEYS) as world:
        open_ = [
            (await world.client.get(path, headers=BROWSER)).status_code
            for path in ("/", "/page/app.js", "/page/style.css")
        ]
        closed = [
            await world.client.get("/"),
            await world.client.get("/v1/models", headers=BROWSER),
            await world.client.get("/v1/requests/r/timeline", headers=BROWSER),
            await world.client.post("/", headers=BROWSER),
            await world.client.post("/page/app.js"),
        ]

    assert open_ == [200, 200, 200]
    assert [response.status_code for response in closed] == [401] * 5


@pytest.mark.parametrize("keys", [[], KEYS])
async def test_without_the_page_browsers_are_treated_as_programs(keys: list[ApiKey]) -> None:
    async with deployment(keys=keys, settings=GatewaySettings(page=False)) as world:
        response = await world.client.get("/", headers=BROWSER)
        file = await world.client.get("/page/app.js", headers=BROWSER)

    if keys:
        assert (response.status_code, file.status_code) == (401, 401)
    else:
        assert response.json()["model"] == "demo"
        assert file.status_code == 404


async def test_a_page_of_another_origin_cannot_use_the_gateway_by_it() -> None:
    async with deployment() as world:
        foreign = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
        asked = await world.client.post("/generate", json={"text": "x"}, headers=foreign)
        framed = await world.client.get("/", headers=BROWSER)
        own = await world.client.post(
            "/v1/chat/completions", json=CHAT, headers={"origin": "http://127.0.0.1"}
        )

    assert asked.status_code == 403
    assert "frame-ancestors 'none'" in framed.headers["content-security-policy"]
    assert own.status_code == 200
