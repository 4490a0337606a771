"""The door: one session per token, this host and origin only, and a strict policy."""

from pathlib import Path

import pytest

from dalsegno.studio.access import CONTENT_POLICY, HEADERS, MARK, Door
from dalsegno.studio.server import static_files
from tests.dalsegno.studio.pages import BUNDLES, CHANGE, ORIGIN, PORT, Visitor, shelf_of, visitor


async def test_a_link_opens_one_session_once_and_the_next_one_is_offered() -> None:
    offered: list[str] = []
    one = Visitor(shelf_of())
    one.door.used = offered.append
    link = one.door.link()

    first = await one.http.get(link)
    assert first.status_code == 303
    assert first.headers["location"] == "/"
    cookie = first.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert (await one.http.get("/api/sources")).status_code == 200
    assert (await one.http.get(link)).status_code == 403
    assert len(offered) == 1
    assert (await one.http.get(offered[0])).status_code == 303


@pytest.mark.parametrize(
    "path", ["/", "/api/sources", "/api/request", *(f"/{name}" for name in static_files())]
)
async def test_nothing_is_served_without_a_session(path: str) -> None:
    answer = await Visitor(shelf_of(*BUNDLES[:1])).http.get(path)

    assert answer.status_code == 401
    assert "dalsegno studio" in answer.text


@pytest.mark.parametrize("token", ["", "wrong", "\u00e9"])
async def test_a_wrong_token_opens_nothing(token: str) -> None:
    one = Visitor(shelf_of())
    one.door.link()

    answer = await one.http.get("/enter", params={"token": token})

    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "cookie", ["", "dalsegno_studio_8123=wrong", "dalsegno_studio_8123=\u00e9", "=;;=", "a"]
)
def test_a_wrong_cookie_is_no_session(cookie: str) -> None:
    door = Door(PORT)
    door.enter(door.link().rpartition("=")[2])

    assert not door.admits(cookie)


def test_the_cookie_of_another_studio_is_no_session() -> None:
    one, other = Door(PORT), Door(PORT + 1)
    session = one.enter(one.link().rpartition("=")[2])

    assert one.admits(f"{one.cookie}={session}")
    assert not other.admits(f"{one.cookie}={session}; {other.cookie}={session}")


@pytest.mark.parametrize(
    "host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:1", f"0.0.0.0:{PORT}", ""]
)
async def test_another_host_is_refused_even_with_a_session(host: str) -> None:
    one = await visitor()

    answer = await one.http.get("/api/sources", headers={"host": host})

    assert answer.status_code == 403


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", f"https://127.0.0.1:{PORT}", "http://127.0.0.1"]
)
async def test_another_origin_is_refused_even_with_a_session(origin: str) -> None:
    one = await visitor()

    answer = await one.http.get("/api/sources", headers={"origin": origin})

    assert answer.status_code == 403


async def test_a_page_of_another_site_is_refused() -> None:
    one = await visitor()

    answer = await one.http.get("/api/sources", headers={"sec-fetch-site": "cross-site"})

    assert answer.status_code == 403


@pytest.mark.parametrize("missing", [*CHANGE])
async def test_a_change_needs_the_origin_and_the_mark(missing: str) -> None:
    one = await visitor()
    headers = {name: value for name, value in CHANGE.items() if name != missing}

    answer = await one.http.post("/api/bundles", content=BUNDLES[0].read_bytes(), headers=headers)

    assert answer.status_code == 403
    assert (await one.get("/api/sources"))["bundles"] == []


@pytest.mark.parametrize("path", ["/", "/api/sources", "/no-such-page", "/enter", "/api/event"])
async def test_every_answer_has_the_policy(path: str) -> None:
    one = await visitor()

    for answer in (await one.http.get(path), await Visitor(shelf_of()).http.get(path)):
        for name, value in HEADERS.items():
            assert answer.headers[name] == value


def test_the_policy_allows_nothing_inline_and_nothing_foreign() -> None:
    assert "default-src 'none'" in CONTENT_POLICY
    assert "unsafe" not in CONTENT_POLICY
    assert "http" not in CONTENT_POLICY
    assert "*" not in CONTENT_POLICY


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/..%2f..%2fpyproject.toml",
        "/static/app.js",
        "/%2e%2e/server.py",
        "/etc/passwd",
        "//etc/passwd",
    ],
)
async def test_no_other_file_is_served(path: str) -> None:
    one = await visitor()

    assert (await one.http.get(ORIGIN + path)).status_code == 404


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "POST"])
@pytest.mark.parametrize("path", ["/api/sources", "/api/requests", "/api/request", "/"])
async def test_nothing_else_can_be_changed(method: str, path: str) -> None:
    one = await visitor()

    assert (await one.http.request(method, path, headers=CHANGE)).status_code == 405


def test_the_pages_have_no_inline_script_or_style() -> None:
    page = (Path(__file__).parents[3] / "dalsegno/studio/static/index.html").read_text(encoding="utf-8")

    assert "<style" not in page
    assert " style=" not in page
    assert page.count("<script") == page.count('<script type="module" src="/') == 1
    assert MARK not in page
