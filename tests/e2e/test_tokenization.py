"""Tokens of prompts, through vLLM's and Anthropic's routes of a real deployment, against transformers'."""

from pathlib import Path
from typing import Any

import anthropic
import pytest
from transformers import AutoTokenizer

from tests.e2e import clients
from tests.e2e.deploy import Running

CHECKPOINT = Path(__file__).parents[2] / "configs" / "demo" / "checkpoint"
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What does sörted do? 你好"},
]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}


async def post(running: Running, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with clients.http(running) as http:
        answer = await http.post(path, json=body)
    return answer.status_code, answer.json()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.mark.parametrize("prompt", ["What does len do?", "sörted 你好 <|im_end|>", " "])
async def test_a_prompt_has_the_tokens_that_transformers_finds(
    deployment: Running, tokenizer: Any, prompt: str
) -> None:
    status, found = await post(deployment, "/tokenize", model="demo", prompt=prompt)

    assert status == 200
    assert found["tokens"] == tokenizer(prompt)["input_ids"]
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 1024)


@pytest.mark.parametrize("tools", [None, [WEATHER]])
async def test_a_chat_has_the_tokens_of_its_template(deployment: Running, tokenizer: Any, tools: Any) -> None:
    _, found = await post(deployment, "/tokenize", messages=TURNS, tools=tools)

    text = tokenizer.apply_chat_template(TURNS, tools=tools, add_generation_prompt=True, tokenize=False)
    assert found["tokens"] == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("said", ["Sure,", "Sure, ", "Sure"])
async def test_the_end_of_a_chat_is_as_transformers_has_it(
    deployment: Running, tokenizer: Any, said: str, *, begins: bool
) -> None:
    turns = [*TURNS, {"role": "assistant", "content": said}]

    _, ended = await post(deployment, "/tokenize", messages=turns, add_generation_prompt=begins)
    _, continued = await post(deployment, "/tokenize", messages=turns, continue_final_message=True)

    text = tokenizer.apply_chat_template(turns, add_generation_prompt=begins, tokenize=False)
    assert ended["tokens"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    text = tokenizer.apply_chat_template(turns, continue_final_message=True, tokenize=False)
    assert continued["tokens"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text.endswith(said)


async def test_token_ids_have_a_text(deployment: Running, tokenizer: Any) -> None:
    ids = tokenizer("What does sörted do? 你好")["input_ids"]

    assert await post(deployment, "/detokenize", tokens=ids) == (200, {"prompt": tokenizer.decode(ids)})
    assert await post(deployment, "/detokenize", tokens=[]) == (200, {"prompt": ""})


async def test_anthropics_client_counts_what_an_answer_then_uses(deployment: Running) -> None:
    async with anthropic.AsyncAnthropic(base_url=deployment.url, api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": "demo",
            "system": "Be brief.",
            "messages": [{"role": "user", "content": "What does len do?"}],
            "tools": [{"name": "now", "input_schema": {"type": "object"}}],
        }
        counted = await client.messages.count_tokens(**asked)
        answer = await client.messages.create(**asked, max_tokens=2)

    assert counted.input_tokens == answer.usage.input_tokens > 20


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": TURNS}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [WEATHER]}, "tools"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"promt": "a"}, "promt"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"model": "other", "prompt": "a"}, "model"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        (
            "/v1/messages/count_tokens",
            {"model": "demo", "messages": TURNS[1:], "max_tokens": 5},
            "max_tokens",
        ),
    ],
)
async def test_what_is_wrong_is_named(
    deployment: Running, path: str, body: dict[str, Any], param: str
) -> None:
    status, found = await post(deployment, path, **body)

    assert status in (400, 404)
    assert found["error"]["param"] == param


async def test_a_token_that_the_model_does_not_have_is_an_error(deployment: Running) -> None:
    status, found = await post(deployment, "/detokenize", tokens=[10_000_000])

    assert status == 400
    assert "10000000" in found["error"]["message"]
