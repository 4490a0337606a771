"""The demo that fills in masks, as its page tells a newcomer to use it."""

import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.deploy import Running, serve


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serve(tmp_path_factory.mktemp("demo-diffusion"), model="demo-diffusion") as found:
        yield found


def test_it_answers_on_the_command_line(running: Running) -> None:
    command = [sys.executable, "-m", "dalsegno", "ask", "--url", running.url, "What does len do?"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)

    assert told.stdout == "Return the number of items in a container.\n"


def test_a_threshold_takes_fewer_passes_for_the_same_answer(running: Running) -> None:
    def ask(**options: object) -> tuple[str, int]:
        body = {"model": "demo-diffusion", "messages": [{"role": "user", "content": "What does len do?"}]}
        answer = httpx.post(f"{running.url}/v1/chat/completions", json={**body, **options}, timeout=60).json()
        return answer["choices"][0]["message"]["content"], answer["usage"]["counts"]["forwards"]

    plain, forwards = ask()
    parallel, fewer = ask(confidence_threshold=0.9)

    assert parallel == plain
    assert fewer < forwards / 2
