"""The plans of pipelines: their walks, what they refuse, what they count; and the families' claims."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from models import registry
from models.checkpoints.claims import CheckpointInfo
from models.diffusion_pipelines.requests import PipelineCall
from shared.errors import ClientError
from shared.events import Guide, Inputs, Limits, Params, WalkResult
from shared.plans import Finish, PlanRequest, StepResult, Walk
from shared.tensors import Handle
from tests.models.diffusion_pipelines.folders import CONFIGS, written

FAMILIES = {
    **dict.fromkeys(CONFIGS, "image_pipeline"),
    **dict.fromkeys((name for name in CONFIGS if name.startswith(("Wan", "LTX"))), "video_pipeline"),
    "Cosmos3OmniPipeline": "cosmos3",
    "KolorsPipeline": "whole_pipeline",
    "CogVideoXPipeline": "whole_video_pipeline",
}
PICTURES = Handle(key="k", dtype="uint8", shape=(8,))
CALL = PipelineCall(makes="video", call={"width": 64}, width=64, height=32, frames=9, fps=12, steps=3)


def asked(*outputs: str, **params: Any) -> PlanRequest:
    return PlanRequest(
        request_id="r",
        inputs=Inputs(text="a cat", output_modalities=list(outputs)),
        params=Params(**params),
        limits=Limits(max_seq_len=64, kv_tokens=64, default_max_tokens=8, absent_nodes=()),
        seed=7,
    )


def without_text(request: PlanRequest) -> PlanRequest:
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "image"}]}]
    inputs = Inputs(messages=messages, output_modalities=request.inputs.output_modalities)
    return msgspec.structs.replace(request, inputs=inputs)


def made(family: str, request: PlanRequest, **facts: Any) -> tuple[Walk, Finish]:
    """The walk behind `prepare`, and the end of the plan."""
    plan = registry.graph(family).plan(request)
    first = next(plan)
    assert isinstance(first, Walk)
    assert first.name == "prepare"
    call = msgspec.structs.replace(CALL, makes=request.inputs.output_modalities[0])
    prepared = WalkResult(name="prepare", facts=msgspec.to_builtins(call), outputs={"pictures": PICTURES})
    walk = plan.send(StepResult((prepared,)))
    assert isinstance(walk, Walk)
    with pytest.raises(StopIteration) as ended:
        plan.send(StepResult((WalkResult(name=walk.name, facts=facts, outputs={}),)))
    assert isinstance(ended.value.value, Finish)
    return walk, ended.value.value


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_folder_is_claimed_by_the_family_of_its_class(tmp_path: Path, kind: str) -> None:
    assert registry.family_of(written(tmp_path, kind)) == FAMILIES[kind]


def test_a_folder_without_a_pipeline_is_not_claimed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for family in ("whole_pipeline", "whole_video_pipeline"):
        claims = registry.graph(family).claims
        assert claims is not None
        assert claims(CheckpointInfo.read(tmp_path)) is None


@pytest.mark.parametrize(
    ("family", "options", "output", "walk"),
    [
        ("image_pipeline", {}, "image", "image_gen"),
        ("video_pipeline", {}, "video", "video_gen"),
        ("video_pipeline", {"frames": True}, "video", "frames_gen"),
        ("video_pipeline", {}, "image", "frames_gen"),
        ("cosmos3", {}, "image", "image_gen"),
        ("wan22", {}, "video", "video_gen"),
        ("whole_pipeline", {}, "image", "image_gen"),
        ("whole_video_pipeline", {"num_frames": 5}, "image", "frames_gen"),
    ],
)
def test_a_request_takes_the_walk_of_what_it_asks_for(
    family: str, options: dict[str, Any], output: str, walk: str
) -> None:
    found, _ = made(family, asked(output, options=options))
    assert (found.name, found.inputs) == (walk, {"pictures": PICTURES})
    assert walk in registry.graph(family).walks


@pytest.mark.parametrize(("options", "frames"), [({}, 1), ({"num_frames": 9}, 9), ({"seconds": 1.0}, None)])
def test_an_image_of_a_family_of_films_is_one_frame(options: dict[str, Any], frames: int | None) -> None:
    step: Any = next(registry.graph("video_pipeline").plan(asked("image", options=options)))
    assert step.args["makes"] == "video"
    assert step.args["options"].get("num_frames") == frames


def test_the_nodes_get_call_prompts_and_seed() -> None:
    options = {"negative_prompt": "dogs", "step_cache": 0.1}
    args: Any = made("image_pipeline", asked("image", options=options))[0].args
    assert (args["call"], args["prompt"], args["negative_prompt"]) == ({"width": 64}, "a cat", "dogs")
    assert (args["seed"], args["step_cache"], args["lora"]) == (7, 0.1, None)


def test_the_prompt_of_a_chat_is_the_text_of_its_last_user() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a dog"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "cat"}]},
    ]
    request = msgspec.structs.replace(
        asked("image"), inputs=Inputs(messages=messages, output_modalities=["image"])
    )
    args: Any = made("image_pipeline", request)[0].args
    assert args["prompt"] == "a\ncat"


def begun(request: PlanRequest) -> PlanRequest:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    inputs = Inputs(messages=messages, output_modalities=["image"], continue_final_message=True)
    return msgspec.structs.replace(request, inputs=inputs)


@pytest.mark.parametrize(
    ("family", "request_", "message"),
    [
        ("image_pipeline", without_text(asked("image")), "expected a prompt"),
        ("image_pipeline", asked("video"), "expected one of image, found .'video'."),
        ("video_pipeline", asked("video", "image"), "expected one of video"),
        ("image_pipeline", asked("image", max_tokens=3), "max_tokens: this model writes no text"),
        ("image_pipeline", begun(asked("image")), "continue_final_message: this model has no chat template"),
        ("image_pipeline", asked("image", guide=Guide(regex="a")), "response_format: "),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_by_name(
    family: str, request_: PlanRequest, message: str
) -> None:
    with pytest.raises(ClientError, match=message):
        next(registry.graph(family).plan(request_))


def test_a_film_with_sound_is_a_film() -> None:
    assert made("cosmos3", asked("video", "audio"))[0].name == "video_gen"


def test_images_frames_and_steps_are_counted() -> None:
    _, image = made("image_pipeline", asked("image"), frames=1, steps=3)
    assert image.usage.counts == {"images": 1, "steps": 3}
    _, film = made("video_pipeline", asked("video"), frames=9, steps=3, cached_calls=1, cache_error=0.002)
    assert film.usage.counts == {"frames": 9, "steps": 3, "cached_calls": 1, "cache_error_ppm": 2000}
    assert film.finish_reasons == ("stop",)


def test_what_a_safety_checker_flags_says_so() -> None:
    _, ended = made("whole_pipeline", asked("image"), frames=1, flagged=True, safety_checker="on")
    assert (ended.finish_reasons, ended.usage.counts["flagged"]) == (("content_filter",), 1)


@pytest.mark.parametrize(
    ("family", "nodes"),
    [
        ("wan22", {"text_encoder", "vae_encoder", "dit", "vae_decoder"}),
        ("cosmos3", {"dit", "vae_encoder", "vae_decoder", "audio_decoder"}),
    ],
)
def test_the_nodes_have_the_names_that_published_placements_use(family: str, nodes: set[str]) -> None:
    graph = registry.graph(family)
    assert nodes <= {*graph.nodes, *graph.former_nodes}
