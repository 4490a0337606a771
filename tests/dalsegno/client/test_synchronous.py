"""The synchronous client; the gateway runs on its own thread."""

import asyncio
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

import pytest
from starlette.responses import Response

from dalsegno import Client, ClientError
from dalsegno.client import NotFoundError
from tests.dalsegno.client.gateway import Break, FakeGateway, Hang, Line, answering, end, error, text

pytestmark = pytest.mark.processes


PATIENCE_S: Final = 60.0


@contextmanager
def serving(*scripts: Iterable[Line] | Response) -> Iterator[FakeGateway]:
    """The gateway, for a caller without an event loop."""
    begun: list[FakeGateway] = []
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with answering(*scripts) as fake:
            begun.append(fake)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield begun[0]
    finally:
        stop.set()
        thread.join()


def test_the_calls_are_the_same() -> None:
    with serving([text(0, "a"), end()], [text(0, "b"), end()], [text(4, "c"), end()]) as fake:
        with Client(fake.url) as client:
            assert client.generate("hi").text == "a"
            assert client.chat("hi").text == "b"
            assert [chunk.text for chunk in client.resume("mine", "hi", after=3)] == ["c"]
            assert client.models() == ["demo", "other"]
            assert not client.health().is_ready
            client.cancel("mine")
        assert fake.cancelled == ["mine"]


def test_a_stream_is_read_piece_by_piece_and_goes_on_where_it_breaks() -> None:
    with serving([text(0, "a"), Break], [text(1, "b"), end()]) as fake, Client(fake.url) as client:
        with client.stream("hi", request_id="mine") as stream:
            assert next(stream).text == "a"
            assert stream.answer.text == "a"
            assert [chunk.text for chunk in stream] == ["b"]
            assert list(stream) == []

        assert (stream.request_id, stream.resumed, stream.answer.finish_reason) == ("mine", 1, "stop")


def test_errors_are_raised_where_the_call_was() -> None:
    refusal = error(404, "model_not_found")
    with serving(refusal) as fake, Client(fake.url) as client, pytest.raises(NotFoundError):
        client.generate("hi")


def test_several_threads_ask_at_once() -> None:
    scripts = [[text(0, str(number)), end()] for number in range(16)]
    with serving(*scripts) as fake, Client(fake.url) as client, ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda _: client.generate("hi").text, range(16)))

    assert sorted(answers) == sorted(str(number) for number in range(16))


def test_leaving_a_stream_lets_go_of_it_and_so_does_dropping_it() -> None:
    for drops in (False, True):
        with serving([text(0, "a"), Hang]) as fake, Client(fake.url) as client:
            if drops:
                for _ in client.stream("hi"):
                    break
                gc.collect()
            else:
                with client.stream("hi") as stream:
                    next(stream)
            wait(fake)


def wait(fake: FakeGateway) -> None:
    """Wait until the gateway saw its client leave; it runs on its own event loop."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if fake.left.is_set():
            return
        pause.wait(0.01)
    raise AssertionError("the client did not leave")


def test_a_stream_outlives_the_name_of_its_client() -> None:
    with serving([text(0, "a"), text(1, "b"), end()]) as fake:
        stream = Client(fake.url).stream("hi")
        gc.collect()
        assert stream.read().text == "ab"


def test_a_closed_client_says_so_and_may_be_closed_again() -> None:
    with serving([text(0, "a"), Hang]) as fake:
        client = Client(fake.url)
        stream = client.stream("hi")
        next(stream)
        client.close()
        client.close()
        for call in (client.health, lambda: next(stream), lambda: client.generate("hi")):
            with pytest.raises(ClientError, match="this client is closed"):
                call()


def test_closing_ends_the_call_that_waits_in_another_thread() -> None:
    with serving([text(0, "a"), Hang]) as fake:
        client = Client(fake.url)
        stream = client.stream("hi")
        next(stream)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(next, stream)
            client.close()
            with pytest.raises(ClientError, match="closed"):
                waiting.result(PATIENCE_S)


# ---- as a program ------------------------------------------------------------------------------------


def program(url: str, text: str) -> "subprocess.Popen[str]":
    """A program that treats every warning as an error, and reports resources that were not closed."""
    # In the background Ctrl-C is ignored, and programs inherit that.
    script = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script += f"from dalsegno import Client\nclient = Client({url!r})\n{text}"
    command = [sys.executable, "-W", "error", "-c", script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_program_that_closes_nothing_ends_quietly() -> None:
    with serving([text(0, "a"), end()], [text(0, "b"), Hang]) as fake:
        ended = program(fake.url, "print(client.generate('hi').text)\nprint(next(client.stream('hi')).text)")
        out, err = ended.communicate(timeout=PATIENCE_S)

    assert (ended.returncode, out, err) == (0, "a\nb\n", "")


def test_ctrl_c_ends_the_call_and_the_request() -> None:
    with serving([text(0, "a"), Hang]) as fake:
        running = program(fake.url, "for chunk in client.stream('hi'): print(chunk.text, flush=True)")
        assert running.stdout is not None
        assert running.stdout.readline() == "a\n"
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=PATIENCE_S)
        wait(fake)

    assert err.rstrip().endswith("KeyboardInterrupt")
    assert err.count("Traceback") == 1
