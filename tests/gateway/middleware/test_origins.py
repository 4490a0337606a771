"""Requests that a page of another origin can make a browser send."""

import pytest

from configs.deployment import GatewaySettings
from gateway.middleware.origins import HostNames, listens_on_loopback
from tests.gateway.world import CHAT, deployment

CHATS = "/v1/chat/completions"
APP = "https://app.example"
OPEN = GatewaySettings(host="0.0.0.0")
ALLOWING = GatewaySettings(cors_origins=[APP])


async def status_of(
    headers: dict[str, str], settings: GatewaySettings | None = None, method: str = "POST", path: str = CHATS
) -> tuple[int, str | None]:
    """The status of a request, and its error's code; a refused one is not on the log."""
    async with deployment(settings=settings) as world:
        body = CHAT if method == "POST" else None
        answer = await world.client.request(method, path, json=body, headers=headers)
        code = answer.json()["error"]["code"] if answer.is_error else None
        assert answer.is_success == bool(world.events("request")) or method != "POST"
    return answer.status_code, code


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://127.0.0.1:3000"},
        {"origin": "https://127.0.0.1"},
        {"origin": "http://127.0.0.1.evil.example"},
        {"origin": "http://127.0.0.1@evil.example"},
        {"origin": "chrome-extension://abc"},
        {"origin": "http://evil.example", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "Cross-Site", "sec-fetch-mode": "navigate"},
        {"origin": "http://127.0.0.1", "sec-fetch-site": "cross-site"},
    ],
)
async def test_pages_of_other_origins_are_refused(headers: dict[str, str]) -> None:
    assert await status_of(headers) == (403, "origin_not_allowed")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://127.0.0.1"},
        {"origin": "http://127.0.0.1:80"},
        {"origin": "http://localhost:8000", "host": "LocalHost:8000"},
        {"origin": "https://127.0.0.1", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        {"sec-fetch-mode": "cors"},
    ],
)
async def test_programs_and_the_own_origin_are_served(headers: dict[str, str]) -> None:
    assert await status_of(headers) == (200, None)


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "OPTIONS"])
async def test_other_methods_are_refused_too(method: str) -> None:
    async with deployment() as world:
        answer = await world.client.request(
            method, "/v1/requests/x", headers={"origin": "http://evil.example"}
        )

    assert answer.status_code == 403


async def test_a_link_to_a_document_may_be_followed_from_anywhere() -> None:
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert await status_of(followed, method="GET", path="/health") == (200, None)
    embedded = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    assert await status_of(embedded, method="GET", path="/health") == (403, "origin_not_allowed")


@pytest.mark.parametrize(
    ("settings", "origin", "status"),
    [
        (ALLOWING, APP, 200),
        (ALLOWING, "HTTPS://App.example", 200),
        (ALLOWING, "https://app.example.evil.example", 403),
        (ALLOWING, "http://app.example", 403),
        (GatewaySettings(cors_origins=["*"]), "null", 200),
    ],
)
async def test_allowed_origins_are_those_of_cors(settings: GatewaySettings, origin: str, status: int) -> None:
    found, _ = await status_of({"origin": origin, "sec-fetch-site": "cross-site"}, settings)
    assert found == status


async def test_a_form_of_another_origin_is_refused() -> None:
    async with deployment() as world:
        for files in ({"text": (None, "a")}, None):
            answer = await world.client.post(
                "/generate", data={"text": "a"}, files=files, headers={"origin": "http://evil.example"}
            )
            assert answer.json()["error"]["code"] == "origin_not_allowed"
        assert not world.events("request")


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000", "a.localhost:1", "localhost."]
)
async def test_on_loopback_its_names_are_right(host: str) -> None:
    assert await status_of({"host": host}) == (200, None)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "127.0.0.1:8000.evil.example", "10.0.0.1",
     "localhost.evil.example", "[::1].evil.example", "[2001:db8::1]", ":8000", "", "0.0.0.0", "2130706433"],
)  # fmt: skip
async def test_on_loopback_other_names_are_refused(host: str) -> None:
    """After DNS rebinding the page's origin is the gateway's, and its name is still the page's."""
    found = await status_of({"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"})
    assert found == (403, "host_not_allowed")


async def test_a_gateway_that_listens_everywhere_has_every_name_unless_they_are_listed() -> None:
    assert (await status_of({"host": "any.example"}, OPEN))[0] == 200
    listed = GatewaySettings(host="0.0.0.0", allowed_hosts=["api.example"])
    assert (await status_of({"host": "any.example"}, listed))[1] == "host_not_allowed"
    assert (await status_of({"host": "API.example:8000"}, listed))[0] == 200


def test_listed_names_may_be_patterns_and_addresses() -> None:
    names = HostNames(["*.Example", "fd00::1", "10.0.0.7", "api.test:8000"], is_open=False)

    assert all(map(names.have, ("a.example:1", "[fd00::1]:80", "10.0.0.7", "api.test", "localhost")))
    assert not any(map(names.have, ("example", "badexample", "10.0.0.8", "api.test.evil", "")))
    assert HostNames(["*"], is_open=False).have("any.example")


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("127.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.7", False),
    ],
)
def test_the_addresses_of_a_listener_on_loopback_are_recognised(host: str, is_loopback: bool) -> None:
    assert listens_on_loopback(host) is is_loopback
