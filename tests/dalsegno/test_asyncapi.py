"""The contract of the log as a document: it is what the code says, and what AsyncAPI calls a document."""

import json
from pathlib import Path
from typing import Any, Final, get_args

import pytest
import yaml
from jsonschema import Draft7Validator, Draft202012Validator, ValidationError

from dalsegno import asyncapi
from shared.events import AnyEvent
from shared.subjects import Subjects
from tests.dalsegno import asyncapi_schema

PAGE: Final = Path(__file__).parents[2] / "docs" / "asyncapi.yaml"
DOCUMENT: Final = asyncapi.document()
_TOKENS: Final = {
    "prefix": "ds", "rank": "0", "to_rank": "1", "from_rank": "0", "writer": "w0", "kind": "epoch",
    "request_id": "r-1", "name": "sql", "gateway": "g-1", "batch_id": "b-1", "conversation_id": "c-1",
}  # fmt: skip


def payload(name: str) -> Draft202012Validator:
    return Draft202012Validator({**DOCUMENT, "$ref": f"#/components/schemas/{name}"})


@pytest.mark.slow
def test_the_document_is_what_the_code_says() -> None:
    shown = PAGE.read_text(encoding="utf-8")

    assert shown == asyncapi.text(), "run python -m dalsegno.asyncapi docs/asyncapi.yaml"
    assert yaml.safe_load(shown) == DOCUMENT


def test_it_is_a_document_by_asyncapis_own_schema() -> None:
    schema = json.loads(Path(asyncapi_schema.__file__).with_name("schema.json").read_text())
    validator = Draft7Validator(schema)

    validator.validate(DOCUMENT)
    for broken in ({"channels": {"a": {"adress": "x"}}}, {"operations": {"a": {"action": "shout"}}}):
        with pytest.raises(ValidationError):
            validator.validate({**DOCUMENT, **broken})


def test_every_event_has_one_channel() -> None:
    told = [kind for channel in asyncapi.CHANNELS for kind in channel.kinds]

    assert len(told) == len(set(told))
    assert set(told) == set(get_args(AnyEvent))


def test_the_channels_are_the_subjects_of_the_stream() -> None:
    subjects = Subjects("ds")
    for channel in asyncapi.CHANNELS:
        subject = channel.address.format_map({**_TOKENS, "origin": "nats"})
        found = subjects.parse(subject)
        assert found is not None
        assert found.kind == channel.name
    assert sorted(f"ds.{channel.name}.>" for channel in asyncapi.CHANNELS) == sorted(subjects.logged())


def test_every_reference_leads_somewhere() -> None:
    def lead(value: Any) -> int:
        if isinstance(value, list):
            return sum(map(lead, value))
        if not isinstance(value, dict):
            return 0
        if "$ref" in value:
            place: Any = DOCUMENT
            for step in value["$ref"].removeprefix("#/").split("/"):
                place = place[step]
            return 1
        return sum(map(lead, value.values()))

    assert lead(DOCUMENT) > 100


def test_whoever_reads_a_channel_knows_its_writers() -> None:
    roles = {name.split(".")[0] for name in DOCUMENT["operations"]}

    assert roles == {"service", "gateway", "conductor", "worker"}
    assert DOCUMENT["operations"]["service.send.request"]["messages"] == [
        {"$ref": "#/channels/request/messages/RequestSubmitted"},
        {"$ref": "#/channels/request/messages/RequestSubmittedJson"},
    ]


@pytest.mark.parametrize(
    ("request_", "fits"),
    [
        ({"model": "demo", "inputs": {"text": "hi"}}, True),
        ({"type": "request.submitted.v1", "model": "demo", "inputs": {"token_ids": [1]}}, True),
        ({"model": "demo", "inputs": {"text": "hi"}, "params": {"max_tokens": 3}, "mine": 1}, True),
        ({"model": "demo", "inputs": {"txt": "hi"}}, False),
        ({"model": "demo", "inputs": {"text": "hi"}, "params": {"temperature": -1}}, False),
        ({"model": "demo", "inputs": {"text": "hi"}, "origin": "a.b"}, False),
        ({"inputs": {"text": "hi"}}, False),
    ],
)
def test_a_payload_is_judged_as_the_conductor_judges_it(request_: dict[str, Any], fits: bool) -> None:
    assert payload("RequestSubmitted").is_valid(request_) == fits


def test_no_pattern_is_pythons_alone() -> None:
    assert "\\A" not in asyncapi.text()
