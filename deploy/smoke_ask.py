"""Requests of smoke.sh to a deployment; uses only the standard library, and runs inside a container.

python3 - URL live                 check that it answers
python3 - URL ready                wait until it is ready
python3 - URL model NAME           check the model's name
python3 - URL chat                 OpenAI's chat route, streaming and not; the same text
python3 - URL generate             the native route: a form, streaming and not; the same text
python3 - URL whole REQUEST_ID     a long answer as one document; prints its text
python3 - LINK studio              open a link of the studio and list the recorded requests
python3 - URL stream REQUEST_ID    the same answer as a stream; prints `began` after its first pieces

`stream` prints the text last, and exits with 3 if the connection broke before the answer's end.
"""

import base64
import http.client
import json
import sys
import time
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

ANSWER: Final = "Return the number of items in a container."
QUESTION: Final = "What does len do?"
TOKENS: Final = 900
READY_S: Final = 120.0
PATIENCE_S: Final = 120.0
BROKEN: Final = 3


def main(url: str, what: str, *name: str) -> int:
    match what:
        case "live":
            assert ask(url, "GET", "/health/live")["status"] == "live"
        case "ready":
            wait_until_ready(url)
        case "model":
            same(name[0], model_of(url))
        case "chat":
            chat(url)
        case "generate":
            generate(url)
        case "studio":
            studio(url)
        case "whole":
            print(whole(url, *name))
        case "stream":
            return stream(url, *name)
        case _:
            raise SystemExit(__doc__)
    return 0


def studio(link: str) -> None:
    """Enter as a browser does: the link opens a session, whose cookie reads the list of requests."""
    parts = urlsplit(link)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE_S)
    connection.request("GET", f"{parts.path}?{parts.query}")
    entered = connection.getresponse()
    entered.read()
    assert entered.status == http.client.SEE_OTHER, f"{link}: {entered.status}"
    connection.request(
        "GET", "/api/requests", headers={"Cookie": entered.headers["set-cookie"].partition(";")[0]}
    )
    response = connection.getresponse()
    rows = json.loads(response.read())["rows"]
    assert "reference" in {row["request_id"] for row in rows}, rows


def send(url: str, method: str, path: str, body: object = None, kind: str = "application/json") -> Any:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE_S)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": kind} if data else {})
    response = connection.getresponse()
    assert response.status == http.client.OK, f"{method} {path}: {response.status} {response.read()!r}"
    return response


def ask(url: str, method: str, path: str, body: object = None) -> Any:
    return json.loads(send(url, method, path, body).read())


def wait_until_ready(url: str) -> None:
    deadline, why = time.monotonic() + READY_S, "no server answers"
    while time.monotonic() < deadline:
        try:
            send(url, "GET", "/health/ready").read()
        except (OSError, http.client.HTTPException, AssertionError) as error:
            why = str(error)
            time.sleep(0.2)
        else:
            return
    raise SystemExit(f"not ready after {READY_S:g} s: {why}")


def model_of(url: str) -> str:
    return str(ask(url, "GET", "/v1/models")["data"][0]["id"])


def chat(url: str) -> None:
    model = model_of(url)
    asked = {"model": model, "temperature": 0, "messages": [{"role": "user", "content": QUESTION}]}
    whole_ = ask(url, "POST", "/v1/chat/completions", asked)["choices"][0]["message"]["content"]
    pieces = []
    for line in send(url, "POST", "/v1/chat/completions", asked | {"stream": True}):
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            pieces += [choice["delta"].get("content") or "" for choice in json.loads(data)["choices"]]
    same(whole_, "".join(pieces))
    same(whole_, ANSWER)


def generate(url: str) -> None:
    boundary = "dal-segno"
    fields = {"text": QUESTION, "model_kwargs": '{"temperature": 0}'}
    form = "".join(
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    )
    kind = f"multipart/form-data; boundary={boundary}"
    streamed = send(url, "POST", "/generate", f"{form}--{boundary}--\r\n".encode(), kind)
    text = "".join(piece for piece, _ in chunks(streamed))
    body = {"text": QUESTION, "streaming": False, "model_kwargs": {"temperature": 0}}
    same(text, text_of(ask(url, "POST", "/generate", body)))


def whole(url: str, request_id: str) -> str:
    return text_of(ask(url, "POST", "/generate", long(request_id) | {"streaming": False}))


def stream(url: str, request_id: str) -> int:
    text, ended = "", False
    try:
        for number, (piece, reason) in enumerate(chunks(send(url, "POST", "/generate", long(request_id)))):
            text += piece
            ended = reason is not None
            if number == 2:
                print("began", flush=True)
    except (OSError, http.client.HTTPException) as error:
        print(f"broke: {error!r}", file=sys.stderr)
    print(text)
    return 0 if ended else BROKEN


def long(request_id: str) -> dict[str, Any]:
    kwargs = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    return {"text": QUESTION, "model_kwargs": kwargs, "request_id": request_id}


def chunks(lines: Iterator[bytes]) -> Iterator[tuple[str, str | None]]:
    """Text and finish reason of each chunk."""
    for line in lines:
        chunk = json.loads(line)
        assert chunk["modality"] == "text", chunk
        yield base64.b64decode(chunk["data"]).decode(), chunk["metadata"].get("finish_reason")


def text_of(document: Any) -> str:
    return base64.b64decode(document["outputs"]["text"][0]["data"]).decode()


def same(one: str, other: str) -> None:
    assert one == other, f"two answers to one question:\n  {one!r}\n  {other!r}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
