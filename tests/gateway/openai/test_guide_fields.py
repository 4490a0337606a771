"""Guides under the names of other servers."""

import json
from typing import Any

import msgspec
import pytest

from gateway.openai.guide_fields import NAMES
from shared.events import Guide, RequestSubmitted
from tests.gateway.world import CHAT, deployment

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "demo", "prompt": "len:"},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GRAMMAR = "start: /a/"


async def asked(path: str, fields: dict[str, Any]) -> tuple[Any, list[RequestSubmitted]]:
    async with deployment() as world:
        response = await world.client.post(path, json=BODIES[path] | fields)
        found = [event for event in world.events("request") if isinstance(event, RequestSubmitted)]
    return response, found


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "guide"),
    [
        ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": GRAMMAR}, {"grammar": GRAMMAR}),
        ({"json_schema": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"ebnf": GRAMMAR}, {"grammar": GRAMMAR}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json_object": True, "regex": None}}, {"json_object": True}),
        ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"grammar": GRAMMAR}}, {"grammar": GRAMMAR}),
    ],
)
async def test_each_is_a_guide(path: str, fields: dict[str, Any], guide: dict[str, Any]) -> None:
    response, [event] = await asked(path, fields)
    assert response.status_code == 200
    assert event.params.guide == msgspec.convert(guide, Guide)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"regex": ""}, "regex"),
        ({"ebnf": 'root ::= "a"'}, "ebnf"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": "x"}, "structured_outputs"),
        ({"guided_regex": "a", "guide": {"regex": "a"}}, "guide"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guide"),
    ],
)
async def test_a_wrong_one_is_named_as_it_was_sent(fields: dict[str, Any], place: str) -> None:
    response, events = await asked("/v1/chat/completions", fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == place
    assert events == []


@pytest.mark.parametrize("path", BODIES)
async def test_null_is_absent(path: str) -> None:
    response, [event] = await asked(path, dict.fromkeys(NAMES))
    assert response.status_code == 200
    assert event.params.guide is None
