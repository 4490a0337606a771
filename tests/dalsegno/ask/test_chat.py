import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from dalsegno.ask.chat import ChatPrompt, stream_answer
from dalsegno.ask.server import NoServerError
from shared.errors import ClientError, DalSegnoError

pytestmark = pytest.mark.processes


Serving = Callable[..., AbstractContextManager[tuple[str, list[dict[str, Any]]]]]


@pytest.fixture
def serving() -> Serving:
    """An HTTP server that knows one answer, and keeps what it was asked."""

    @contextmanager
    def serve(answer: str, status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        asked: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, json.dumps({"data": [{"id": "demo"}]}))

            def do_POST(self) -> None:
                asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.reply(status, answer)

            def reply(self, status: int, body: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: Any) -> None:
                pass

        with HTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}", asked
            finally:
                server.shutdown()
                thread.join()

    return serve


def asked_for(prompt: ChatPrompt) -> Iterator[str]:
    return stream_answer(prompt, pytest.fail)


def stream(*texts: str, end: str = "data: [DONE]\n\n") -> str:
    events = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    role = 'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
    return role + "".join(f"data: {json.dumps(event)}\n\n" for event in events) + end


def test_the_answer_comes_piece_by_piece(serving: Serving) -> None:
    with serving(": a comment\n\n" + stream("Return", " the", " length.")) as (url, asked):
        assert list(asked_for(ChatPrompt(text="len?", url=url))) == ["Return", " the", " length."]
    assert asked == [
        {"model": "demo", "messages": [{"role": "user", "content": "len?"}], "stream": True}
    ]  # the server chooses parameters that are not given


def test_what_is_told_is_passed_on(serving: Serving) -> None:
    with serving(stream("x")) as (url, asked):
        list(asked_for(ChatPrompt(text="len?", url=url, model="mine", max_tokens=3, temperature=0.0, seed=7)))
    assert {key: asked[0][key] for key in ("model", "max_tokens", "temperature", "seed")} == {
        "model": "mine",
        "max_tokens": 3,
        "temperature": 0.0,
        "seed": 7,
    }


def test_no_server_is_one_line_with_the_way_out() -> None:
    with pytest.raises(NoServerError, match=r"no server answers at http://127\.0\.0\.1:1 .*dalsegno serve"):
        list(asked_for(ChatPrompt(text="len?", url="http://127.0.0.1:1")))


def test_a_server_that_is_long_silent_is_waited_for_and_named_once() -> None:
    told = list[str]()
    noticed = threading.Event()

    def notice(text: str) -> None:
        told.append(text)
        noticed.set()

    def answer(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            received = b""
            while not received.endswith(b"}"):
                received += connection.recv(65536)
            assert noticed.wait(60)
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + stream("late").encode())

    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread = threading.Thread(target=answer, args=(listening,))
        thread.start()
        try:
            assert list(
                stream_answer(ChatPrompt(text="len?", url=url, model="demo"), notice, silent_s=0)
            ) == ["late"]
        finally:
            noticed.set()
            thread.join()
    assert told == [f"{url} has not answered yet; {url}/health says how it is"]


def test_a_refusal_is_the_servers_own_message(serving: Serving) -> None:
    body = json.dumps({"error": {"message": "model 'x' is unknown", "type": "invalid_request_error"}})
    with serving(body, status=404) as (url, _), pytest.raises(DalSegnoError, match=r"^model 'x' is unknown$"):
        list(asked_for(ChatPrompt(text="len?", url=url, model="x")))


def test_who_has_no_key_is_told_where_to_say_it(serving: Serving) -> None:
    body = json.dumps({"error": {"message": "send it as a header", "code": "missing_api_key"}})
    wanted = pytest.raises(ClientError, match=r"requires an API key: set it in DALSEGNO_API_KEY$")
    with serving(body, status=401) as (url, _), wanted:
        list(asked_for(ChatPrompt(text="len?", url=url)))


def test_a_refusal_in_no_known_form_is_shown_as_it_is(serving: Serving) -> None:
    refused = pytest.raises(ClientError, match="answered 502: <h1>Bad Gateway")
    with serving("<h1>Bad Gateway</h1>", status=502) as (url, _), refused:
        list(asked_for(ChatPrompt(text="len?", url=url)))


def test_an_error_in_the_middle_of_a_stream_ends_it(serving: Serving) -> None:
    with serving(stream("Re", end='data: {"error": {"message": "the worker died"}}\n\n')) as (url, _):
        pieces = asked_for(ChatPrompt(text="len?", url=url))
        assert next(pieces) == "Re"
        with pytest.raises(DalSegnoError, match=r"^the worker died$"):
            next(pieces)


def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(serving: Serving) -> None:
    with serving(stream("Re", end="")) as (url, _):
        pieces = asked_for(ChatPrompt(text="len?", url=url))
        assert next(pieces) == "Re"
        with pytest.raises(NoServerError, match="broke off"):
            next(pieces)


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ClientError, match="is not a server address"):
        list(asked_for(ChatPrompt(text="len?", url=url)))
