"""Refusals of parameters that a diffusion language model cannot follow."""

from types import SimpleNamespace
from typing import Any

import pytest

from models.diffusion_text.graph import refuse_unsupported
from shared.errors import ClientError
from shared.events import Params


def request(**params: Any) -> Any:
    return SimpleNamespace(params=Params(**params))


def test_parameters_that_are_turned_off_are_accepted() -> None:
    off: dict[str, Any] = {
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "bad_words": [],
        "min_tokens": 0,
        "min_p": 0.1,
    }

    refuse_unsupported(request(max_tokens=4, **off))


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"presence_penalty": -0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"bad_words": ["no"]}, "bad_words"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"max_tokens": 0, "echo": True}, "max_tokens=0"),
        ({"warm": True}, "warm"),
    ],
)
def test_parameters_that_need_an_order_are_refused_by_name(params: dict[str, Any], name: str) -> None:
    with pytest.raises(ClientError, match=name):
        refuse_unsupported(request(**params))
