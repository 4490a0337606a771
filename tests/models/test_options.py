"""Options of a family: declared with defaults and bounds, validated by name, shown as JSON schema."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
import pytest
from msgspec import Meta

from models import options
from models.base import ModelGraph
from models.options import InvalidOptionError, OptionsError
from shared.errors import ClientError
from shared.events import Inputs, Limits, Params
from shared.plans import PlanRequest


class FlowOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a flow decoder.

    Attributes:
        steps: denoising steps.
        guidance: strength of the guidance; 1 is off.
    """

    steps: Annotated[int, Meta(ge=1, le=50)] = 10
    guidance: Annotated[float, Meta(ge=0)] = 1.0


class NamedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options with names of other servers.

    Attributes:
        steps: denoising steps.
    """

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {"num_steps": "steps", "diffusion_steps": "steps"}

    steps: int = 10


class Misnamed(msgspec.Struct):
    """Another name for nothing.

    Attributes:
        steps: denoising steps.
    """

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {"num_steps": "stepps"}

    steps: int = 10


class Required(msgspec.Struct):
    """A required option.

    Attributes:
        steps: denoising steps.
    """

    steps: int


class Undescribed(msgspec.Struct):
    """An option without a description."""

    steps: int = 1


class Taken(msgspec.Struct):
    """An option with the name of a parameter.

    Attributes:
        seed: of the noise.
    """

    seed: int = 1


def plan_request(given: dict[str, Any]) -> PlanRequest:
    limits = Limits(max_seq_len=8, kv_tokens=8, default_max_tokens=8, max_attempts=1)
    return PlanRequest(
        request_id="r", inputs=Inputs(text="x"), params=Params(options=given), limits=limits, seed=1
    )


@pytest.mark.parametrize(
    ("given", "param", "problem"),
    [
        ({"steps": 0}, "model_kwargs.steps", "expected an integer >= 1, found 0"),
        ({"steps": 51}, "model_kwargs.steps", "expected an integer <= 50, found 51"),
        ({"steps": "4"}, "model_kwargs.steps", "expected an integer, found '4'"),
        ({"steps": 2.5}, "model_kwargs.steps", "expected an integer, found 2.5"),
        ({"guidance": None}, "model_kwargs.guidance", "expected a number, found null"),
        ({"step": 4}, "model_kwargs.step", "unknown option; did you mean 'steps'?"),
        ({"colour": 4}, "model_kwargs.colour", "unknown option; expected one of steps, guidance"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, Any], param: str, problem: str) -> None:
    with pytest.raises(InvalidOptionError) as raised:
        options.check(FlowOptions, given, "model_kwargs.")

    assert (raised.value.param, raised.value.message) == (param, f"{param}: {problem}")
    assert raised.value.status == 400


def test_right_options_pass_and_reach_the_plan_with_defaults() -> None:
    options.check(FlowOptions, {"steps": 4})

    assert plan_request({"steps": 4}).options_as(FlowOptions) == FlowOptions(steps=4, guidance=1.0)
    with pytest.raises(ClientError, match="steps"):
        plan_request({"steps": 0}).options_as(FlowOptions)


def test_names_of_other_servers_are_those_of_the_options() -> None:
    given = {"num_steps": 4, "colour": "red"}

    assert options.renamed(NamedOptions, given) == {"steps": 4, "colour": "red"}
    assert options.renamed(NamedOptions, {"num_steps": 4, "steps": 4}) == {"steps": 4}
    assert options.renamed(None, given) == given
    with pytest.raises(InvalidOptionError) as raised:
        options.renamed(NamedOptions, {"steps": 5, "diffusion_steps": 4}, "model_kwargs.")
    assert raised.value.param == "model_kwargs.diffusion_steps"
    assert "expected it once, found model_kwargs.steps" in raised.value.message


def test_a_family_without_options_takes_none() -> None:
    options.check(None, {})
    with pytest.raises(InvalidOptionError, match=r"steps: unknown option; this model has none"):
        options.check(None, {"steps": 4})


def test_the_schema_shows_defaults_bounds_and_descriptions() -> None:
    assert options.schema(FlowOptions) == {
        "type": "object",
        "properties": {
            "steps": {
                "type": "integer",
                "minimum": 1,
                "maximum": 50,
                "default": 10,
                "description": "denoising steps.",
            },
            "guidance": {
                "type": "number",
                "minimum": 0,
                "default": 1.0,
                "description": "strength of the guidance; 1 is off.",
            },
        },
        "additionalProperties": False,
    }
    assert options.schema(None)["properties"] == {}


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Required, "expected a default"),
        (Undescribed, "expected a description"),
        (Taken, "another name"),
        (Misnamed, "expected a new name for one of steps"),
    ],
)
def test_a_declaration_is_checked_when_the_graph_is_made(kind: Any, problem: str) -> None:
    def plan(_: PlanRequest) -> Any:
        raise NotImplementedError

    with pytest.raises(OptionsError, match=problem):
        ModelGraph(family="flow", nodes={}, walks={}, plan=plan, options=kind)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"mask": "x" * 1_100_000}, "at most 1048576 bytes"),
        ({"mask": float("nan")}, "JSON"),
        ({"mask": {1: 2}}, "JSON"),
        ({"mask": "\ud800"}, "lone surrogate"),
    ],
)
def test_options_are_portable_json_of_bounded_size(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=f"options: .*{problem}"):
        Params(options=given)
