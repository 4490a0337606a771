"""The conductor refuses options that the model's family does not have: a service may publish any request."""

import dataclasses
from typing import Any

import pytest

from models import registry
from models.base import ModelGraph
from shared.events import Inputs, Params, RequestAdmitted, RequestRejected
from tests.conductor.script import Script
from tests.models.test_options import FlowOptions


def graph_with_options(family: str) -> ModelGraph:
    return dataclasses.replace(registry.graph("decoder_lm"), options=FlowOptions)


def submitted(given: dict[str, Any], **how: Any) -> Script:
    script = Script(**how)
    script.open_epoch()
    script.join()
    script.submit("r1", inputs=Inputs(text="x"), params=Params(options=given))
    return script


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 99}, "options.steps: expected an integer <= 50, found 99"),
        ({"step": 4}, "options.step: unknown option; did you mean 'steps'?"),
    ],
)
def test_a_wrong_option_is_rejected(given: dict[str, Any], message: str) -> None:
    rejected = submitted(given, graph_of=graph_with_options).last(RequestRejected)

    assert (rejected.failure.code, rejected.failure.status) == ("invalid_value", 400)
    assert rejected.failure.message == message


def test_right_options_are_admitted() -> None:
    assert submitted({"steps": 4}, graph_of=graph_with_options).last(RequestAdmitted)


def test_a_family_without_options_takes_none() -> None:
    assert submitted({"steps": 4}).last(RequestRejected).failure.code == "invalid_value"
