"""`dalsegno check` shows the options of a family."""

from typing import Annotated

import msgspec
from msgspec import Meta

from dalsegno.check.command import options_in_words
from models.base import ModelGraph
from shared.plans import Plan, PlanRequest


class FlowOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a flow decoder.

    Attributes:
        steps: denoising steps.
        scale: the strength of the guidance.
        masks: latents to leave out.
    """

    steps: Annotated[int, Meta(ge=1, le=50)] = 10
    scale: Annotated[float, Meta(gt=0)] | None = None
    masks: list[int] = []


def plan(_: PlanRequest) -> Plan:
    raise NotImplementedError


def test_an_option_is_a_line_with_type_bounds_default_and_meaning() -> None:
    graph = ModelGraph(family="flow", nodes={}, walks={}, plan=plan, options=FlowOptions)

    assert list(options_in_words(graph)) == [
        "steps, integer from 1 to 50, default 10: denoising steps.",
        "scale, number above 0, default null: the strength of the guidance.",
        "masks, array, default []: latents to leave out.",
    ]


def test_a_family_without_options_has_no_lines() -> None:
    assert list(options_in_words(ModelGraph(family="flow", nodes={}, walks={}, plan=plan))) == []
