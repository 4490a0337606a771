"""Damaged HTTP requests: an answer or a client error in OpenAI's schema, never a 500, never a hang."""

import json
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.e2e.deploy import Running
from tests.fuzz.damage import FUZZED, damaged_bytes, damaged_value

_TIMEOUT_S: Final = 30.0
_CHAT: Final = {
    "model": "demo",
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "What does len do?"}]},
    ],
    "max_tokens": 3,
    "temperature": 0.0,
    "top_p": 0.9,
    "seed": 7,
    "stop": ["\n"],
    "n": 2,
    "logprobs": True,
    "top_logprobs": 2,
    "stream": False,
}
_COMPLETION: Final = {
    "model": "demo", "prompt": ["What does len do?", "x"], "max_tokens": 3, "echo": True, "logprobs": 1,
    "n": 1, "stop": "\n", "stream": True, "stream_options": {"include_usage": True},
}  # fmt: skip
_GENERATE: Final = {
    "text": "What does len do?", "streaming": False, "chat": True,
    "model_kwargs": {"max_tokens": 3, "temperature": 0, "stop": ["\n"], "ignore_eos": False},
    "input_modalities": "text", "output_modalities": ["text"],
}  # fmt: skip
_ROUTES: Final[dict[str, Any]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": _COMPLETION,
    "/generate": _GENERATE,
}
_FORM: Final = (
    b'--b\r\nContent-Disposition: form-data; name="text"\r\n\r\nWhat does len do?\r\n'
    b'--b\r\nContent-Disposition: form-data; name="model_kwargs"\r\n\r\n{"max_tokens": 2}\r\n'
    b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n'
    b"Content-Type: image/png\r\n\r\n\x89PNG\r\n--b--\r\n"
)


@pytest.fixture(scope="module")
def client(deployment: Running) -> Iterator[httpx.Client]:
    """A client; afterwards a valid request gets its normal answer."""
    with httpx.Client(base_url=deployment.url, timeout=_TIMEOUT_S) as client:
        yield client
        answer = client.post("/v1/chat/completions", json=_proper())
        assert answer.json()["choices"][0]["message"]["content"] == (
            "Return the number of items in a container."
        )


def _proper() -> dict[str, Any]:
    return {"model": "demo", "temperature": 0, "messages": [{"role": "user", "content": "What does len do?"}]}


def assert_answered(answer: httpx.Response) -> None:
    if answer.status_code == 200:
        assert b'"internal_error"' not in answer.content
        return
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert len(error["message"]) < 4000


@pytest.mark.processes
@pytest.mark.parametrize("route", list(_ROUTES))
@given(data=st.data())
@FUZZED
def test_damaged_values_are_answered(client: httpx.Client, route: str, data: st.DataObject) -> None:
    body = json.dumps(data.draw(damaged_value(_ROUTES[route])))

    assert_answered(client.post(route, content=body, headers={"content-type": "application/json"}))


@pytest.mark.slow
@pytest.mark.parametrize("route", list(_ROUTES))
@given(data=st.data())
@FUZZED
def test_damaged_json_is_answered(client: httpx.Client, route: str, data: st.DataObject) -> None:
    body = data.draw(damaged_bytes(json.dumps(_ROUTES[route]).encode()))

    assert_answered(client.post(route, content=body, headers={"content-type": "application/json"}))


@given(body=damaged_bytes(_FORM))
@FUZZED
def test_a_damaged_form_is_answered(client: httpx.Client, body: bytes) -> None:
    headers = {"content-type": "multipart/form-data; boundary=b"}

    assert_answered(client.post("/generate", content=body, headers=headers))


@given(
    method=st.sampled_from(("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD")),
    path=st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="#?"), max_size=40),
    header=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60).map(str.strip),
)
@FUZZED
def test_any_path_is_answered(client: httpx.Client, method: str, path: str, header: str) -> None:
    url = httpx.URL(client.base_url).copy_with(raw_path=b"/" + path.encode())
    answer = client.request(method, url, headers={"x-request-id": header, "traceparent": header})

    assert answer.status_code < 500
