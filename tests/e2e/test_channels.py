"""A deployment of gpt-oss (random weights) with a template whose answers have channels, as the real one."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import clients, deploy
from tests.e2e.deploy import Running
from tests.e2e.test_reasoning import FORM
from tests.tiny import tiny_checkpoint

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }} to=functions.NAME<|channel|>commentary json<|message|>{% endif %}"
    "{{ '<|channel|>analysis<|message|>' if false else '' }}<|start|>assistant"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": FORM["json_schema"]["schema"]},
}


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("channels")
    checkpoint = Path(shutil.copytree(tiny_checkpoint("gpt_oss"), folder / "checkpoint"))
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    with deploy.serve(folder, model=str(checkpoint)) as running:
        yield running


async def chat(running: Running, **change: Any) -> dict[str, Any]:
    body = {
        "model": "checkpoint",
        "messages": [{"role": "user", "content": "Is it warm?"}],
        "temperature": 1,
        "max_tokens": 240,
        "thinking_budget": 40,
        **change,
    }
    async with clients.http(running) as http:
        found = (await http.post("/v1/chat/completions", json=body)).json()
    assert "error" not in found, found
    choice: dict[str, Any] = found["choices"][0]
    return choice


async def test_a_call_that_is_forced_follows_the_reasoning_and_its_schema(channels: Running) -> None:
    found = [await chat(channels, tools=[WEATHER], tool_choice="required", seed=seed) for seed in range(12)]

    for choice in found:
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"])["city"] in ("Ulm", "Rom")
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls"
    assert any("reasoning_content" in choice["message"] for choice in found)


async def test_an_answer_by_a_schema_is_in_the_final_channel(channels: Running) -> None:
    found = [await chat(channels, response_format=FORM, seed=seed) for seed in range(12)]

    assert {json.loads(choice["message"]["content"])["city"] for choice in found} <= {"Ulm", "Rom"}
    assert any("reasoning_content" in choice["message"] for choice in found)
    assert not any("<|" in choice["message"]["content"] for choice in found)
