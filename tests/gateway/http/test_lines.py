import json

import pytest

from gateway.http.lines import json_line, server_sent_event
from tests.gateway.world import CHAT, Performance, deployment

TEXT = "a\u2028b\u2029c\x85d\re\nf\x1cg\x0bh\u00e9"


def test_no_character_of_a_line_ends_it() -> None:
    line = json_line({"text": TEXT}).decode()

    assert len(line.splitlines()) == 1
    assert "\u00e9" in line
    assert json.loads(line) == {"text": TEXT}
    assert server_sent_event({"a": "\u2028"}, "1") == b'id: 1\ndata: {"a":"\\u2028"}\n\n'


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
async def test_events_of_a_stream_are_lines_for_every_client(route: str) -> None:
    async def say(performance: Performance) -> None:
        performance.say(TEXT)
        performance.finish()

    body = CHAT if "chat" in route else {"model": "demo", "prompt": "a"}
    async with deployment(say) as world:
        answer = await world.client.post(route, json=body | {"stream": True})

    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(event)["choices"][0] for event in events]
    texts = [one.get("text") or one.get("delta", {}).get("content") or "" for one in choices]
    assert "".join(texts) == TEXT
