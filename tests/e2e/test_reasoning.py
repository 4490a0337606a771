"""A deployment of a model that thinks (random weights, a template that opens the reasoning), step by step."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import clients, deploy
from tests.e2e.deploy import Running
from tests.tiny import tiny_checkpoint

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Is it warm?"}],
    "temperature": 1,
    "seed": 5,
    "max_tokens": 60,
    "ignore_eos": True,
}
FORM: dict[str, Any] = {"type": "json_schema", "json_schema": {
    "name": "weather",
    "schema": {"type": "object", "properties": {"city": {"enum": ["Ulm", "Rom"]}}, "required": ["city"],
               "additionalProperties": False},
}}  # fmt: skip


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("thinking")
    checkpoint = Path(shutil.copytree(tiny_checkpoint("qwen3"), folder / "checkpoint"))
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    with deploy.serve(folder, model=str(checkpoint)) as running:
        yield running


async def chat(running: Running, **change: Any) -> dict[str, Any]:
    async with clients.http(running) as http:
        answer = await http.post("/v1/chat/completions", json=ASKED | change)
    found: dict[str, Any] = answer.json()
    return found


async def test_an_answer_that_stays_within_its_reasoning_has_no_text(thinking: Running) -> None:
    found = await chat(thinking, model="checkpoint")

    message = found["choices"][0]["message"]
    assert message["content"] == ""
    assert message["reasoning_content"]
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 60}


async def test_reasoning_over_its_limit_is_closed_and_the_answer_follows_its_schema(
    thinking: Running,
) -> None:
    found = await chat(
        thinking, model="checkpoint", thinking_budget=9, response_format=FORM, ignore_eos=False
    )

    message = found["choices"][0]["message"]
    assert json.loads(message["content"])["city"] in ("Ulm", "Rom")
    assert message["reasoning_content"]
    closing = len("</think>")  # this vocabulary spells the mark, at worst a letter at a time
    assert 9 < found["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 9 + 3 + closing


async def test_a_model_that_is_not_to_think_answers_at_once(thinking: Running) -> None:
    found = await chat(thinking, model="checkpoint", chat_template_kwargs={"enable_thinking": False})

    message = found["choices"][0]["message"]
    assert message["content"]
    assert "reasoning_content" not in message
    assert "completion_tokens_details" not in found["usage"]


async def test_the_same_answer_streamed_is_the_same(thinking: Running) -> None:
    fields = {"model": "checkpoint", "thinking_budget": 9, "response_format": FORM, "ignore_eos": False}
    whole = await chat(thinking, **fields)
    async with clients.http(thinking) as http:
        answer = await http.post("/v1/chat/completions", json={**ASKED, **fields, "stream": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events]

    message = whole["choices"][0]["message"]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == message[name]


async def test_an_option_of_no_template_is_an_error(thinking: Running) -> None:
    found = await chat(thinking, model="checkpoint", chat_template_kwargs={"mood": 1})

    assert found["error"]["code"] == "not_supported"
    assert (
        "expected options of this model's chat template, which are: enable_thinking"
        in found["error"]["message"]
    )
