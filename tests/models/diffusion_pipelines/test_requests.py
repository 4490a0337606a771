"""The call of a request: defaults of each class, and what is refused with the nearest value that is not."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from models.diffusion_pipelines.classes import KNOWN, class_of
from models.diffusion_pipelines.folder import PipelineFolder
from models.diffusion_pipelines.options import CosmosOptions, ImageOptions, VideoOptions
from models.diffusion_pipelines.requests import PipelineCall, check_pictures, pipeline_call
from models.options import InvalidOptionError
from shared.errors import ClientError
from tests.models.diffusion_pipelines.folders import CONFIGS, written

DEFAULTS = {
    "ZImagePipeline": (1024, 1024, 1, 50),
    "QwenImagePipeline": (1024, 1024, 1, 50),
    "FluxPipeline": (1024, 1024, 1, 28),
    "Flux2KleinPipeline": (1024, 1024, 1, 50),
    "StableDiffusion3Pipeline": (1024, 1024, 1, 28),
    "StableDiffusionXLPipeline": (1024, 1024, 1, 50),
    "WanPipeline": (1280, 704, 81, 50),
    "WanImageToVideoPipeline": (1280, 704, 81, 50),
    "LTXPipeline": (704, 512, 161, 50),
    "LTXImageToVideoPipeline": (704, 512, 161, 50),
    "Cosmos3OmniPipeline": (1280, 704, 17, 35),
}
OPTIONS: dict[str, type[ImageOptions]] = {"image": ImageOptions, "video": VideoOptions}


def options_of(kind: str) -> type[ImageOptions]:
    return CosmosOptions if kind.startswith("Cosmos3") else OPTIONS[KNOWN[kind].makes[0]]


def call(folder: Path, pictures: int | None = None, makes: str = "", **options: Any) -> PipelineCall:
    read = PipelineFolder.read(folder)
    facts = class_of(read)
    kind = options_of(read.kind) if read.kind in KNOWN else VideoOptions
    return pipeline_call(
        read,
        msgspec.convert(options, kind),
        makes=makes or facts.makes[0],
        pictures=facts.images[0] if pictures is None else pictures,
    )


@pytest.mark.parametrize("kind", KNOWN)
def test_a_request_that_asks_for_nothing_gets_the_defaults_of_the_class(tmp_path: Path, kind: str) -> None:
    made = call(written(tmp_path, kind))
    assert (made.width, made.height, made.frames, made.steps) == DEFAULTS[kind]
    assert (made.call["width"], made.call["height"]) == (made.width, made.height)
    assert made.call["num_inference_steps"] == made.steps


def test_every_known_class_is_tested() -> None:
    assert set(KNOWN) == set(CONFIGS) == set(DEFAULTS)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("ZImagePipeline", {"width": 1000}, "width: .* multiple of 16 .* found 1000; the nearest is 992"),
        ("ZImagePipeline", {"height": 4000}, "height: .* to 2048, found 4000; the nearest is 2048"),
        ("WanPipeline", {"height": 720}, "height: .* multiple of 32 .* found 720; the nearest is 704"),
        ("WanPipeline", {"num_frames": 80}, "multiple of 4 plus 1 .* found 80; the nearest is 81"),
        ("WanPipeline", {"num_frames": 4096}, "from 1 to 1025, found 4096; the nearest is 1025"),
        ("WanPipeline", {"num_inference_steps": 101}, "1 to 100, found 101; the nearest is 100"),
        ("LTXPipeline", {"num_frames": 12}, "multiple of 8 plus 1 .* found 12; the nearest is 9"),
        ("LTXPipeline", {"width": 720}, "multiple of 32 .* found 720; the nearest is 704"),
        ("Cosmos3OmniPipeline", {"width": 1000}, "multiple of 32 .* found 1000; the nearest is 992"),
        ("WanPipeline", {"num_frames": 5, "seconds": 1}, "seconds: .* found both"),
        ("WanPipeline", {"seconds": 60}, "seconds: expected at most 42.7"),
    ],
)
def test_what_a_class_cannot_do_is_refused_with_the_nearest_value(
    tmp_path: Path, kind: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidOptionError, match=message) as refused:
        call(written(tmp_path, kind), **options)
    assert refused.value.param in options


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("ZImagePipeline", "strength"),
        ("Flux2KleinPipeline", "negative_prompt"),
        ("StableDiffusionXLPipeline", "max_sequence_length"),
        ("LTXPipeline", "guidance_scale_2"),
        ("StableDiffusion3Pipeline", "true_cfg_scale"),
    ],
)
def test_an_option_that_a_class_does_not_have_is_refused_by_name(
    tmp_path: Path, kind: str, option: str
) -> None:
    value: Any = "blue" if option == "negative_prompt" else 1
    with pytest.raises(InvalidOptionError, match=f"{option}: {kind} has no such option"):
        call(written(tmp_path, kind), **{option: value})


@pytest.mark.parametrize(
    ("kind", "pictures", "message"),
    [
        ("ZImagePipeline", 1, "takes no input image, found 1"),
        ("WanImageToVideoPipeline", 0, "takes one input image, found 0"),
        ("Flux2KleinPipeline", 5, "takes 0 to 4 input images, found 5"),
    ],
)
def test_the_number_of_input_images_is_checked(
    tmp_path: Path, kind: str, pictures: int, message: str
) -> None:
    with pytest.raises(ClientError, match=message):
        call(written(tmp_path, kind), pictures)


def test_a_modality_that_a_class_does_not_make_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="ZImagePipeline makes image, found 'video'"):
        call(written(tmp_path, "ZImagePipeline"), makes="video")


@pytest.mark.parametrize(("seconds", "frames"), [(0.1, 1), (0.2, 5), (1, 25), (5, 121)])
def test_a_length_in_seconds_is_the_nearest_number_of_frames(
    tmp_path: Path, seconds: float, frames: int
) -> None:
    assert call(written(tmp_path, "WanPipeline"), seconds=seconds).call["num_frames"] == frames


def test_guidance_has_the_name_that_the_class_has_for_it(tmp_path: Path) -> None:
    qwen = written(tmp_path / "qwen", "QwenImagePipeline")
    flux = written(tmp_path / "flux", "FluxPipeline")
    assert call(qwen, guidance_scale=3).call["true_cfg_scale"] == 3
    assert call(qwen, true_cfg_scale=3).call["true_cfg_scale"] == 3
    with pytest.raises(InvalidOptionError, match="this model's guidance_scale, found 2 and 3"):
        call(qwen, true_cfg_scale=2, guidance_scale=3)
    both = call(flux, true_cfg_scale=2, guidance_scale=3).call
    assert (both["true_cfg_scale"], both["guidance_scale"]) == (2, 3)


def test_frames_per_second_reach_the_classes_that_are_conditioned_on_them(tmp_path: Path) -> None:
    assert call(written(tmp_path / "ltx", "LTXPipeline"), fps=12).call["frame_rate"] == 12
    wan = call(written(tmp_path / "wan", "WanPipeline"), fps=12)
    assert (wan.fps, "frame_rate" in wan.call, "fps" in wan.call) == (12, False, False)


def test_an_image_of_cosmos3_is_one_frame_with_the_steps_of_an_image(tmp_path: Path) -> None:
    made = call(written(tmp_path, "Cosmos3OmniPipeline"), makes="image")
    assert (made.frames, made.call["num_frames"], made.steps) == (1, 1, 50)


def test_the_templates_of_cosmos3_are_off_unless_asked_for(tmp_path: Path) -> None:
    folder = written(tmp_path, "Cosmos3OmniPipeline")
    names = ("use_system_prompt", "add_resolution_template", "add_duration_template", "enable_sound")
    assert not any(call(folder).call[name] for name in names)
    assert call(folder, use_resolution_template=True).call["add_resolution_template"] is True


def test_a_class_that_is_not_known_decides_itself(tmp_path: Path) -> None:
    made = call(written(tmp_path, "SomeImagePipeline"))
    assert (made.width, made.height, made.steps, made.call) == (0, 0, 0, {})
    folder = written(tmp_path / "video", "SomeVideoPipeline")
    assert (call(folder).makes, call(folder, num_frames=7).call) == ("video", {"num_frames": 7})


def test_width_and_height_can_be_given_as_one_size(tmp_path: Path) -> None:
    folder = written(tmp_path, "ZImagePipeline")
    made = call(folder, size="640x480")
    assert (made.width, made.height) == (640, 480)
    with pytest.raises(InvalidOptionError, match=r"size: .* or width and height; found both"):
        call(folder, size="640x480", width=640)


@pytest.mark.parametrize(("positions", "most"), [(256, 224), (1536, None)])
def test_a_prompt_is_cut_where_z_image_has_no_more_positions(
    tmp_path: Path, positions: int, most: int | None
) -> None:
    folder = written(tmp_path, "ZImagePipeline")
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"axes_lens": [positions, 512, 512]}))
    assert call(folder).call.get("max_sequence_length") == most
    with pytest.raises(InvalidOptionError, match=r"max_sequence_length: expected 1 to \d+, found 2000"):
        call(folder, max_sequence_length=2000)


def test_wan_is_asked_for_no_more_positions_than_it_has(tmp_path: Path) -> None:
    folder = written(tmp_path, "WanPipeline")
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_max_seq_len": 32}))
    made = call(folder)
    assert (made.width, made.height) == (1024, 704)
    with pytest.raises(InvalidOptionError, match=r"width: .* to 1024, found 1056; the nearest is 1024"):
        call(folder, width=1056)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_max_seq_len": 9}))
    assert call(folder).frames == 33
    for frames in (37, 1025):
        with pytest.raises(InvalidOptionError, match=r"from 1 to 33, found .*; the nearest is 33"):
            call(folder, num_frames=frames)
    with pytest.raises(InvalidOptionError, match=r"seconds: expected at most 1\.375, 33 frames"):
        call(folder, seconds=3)


def test_a_changed_image_has_the_size_of_its_input(tmp_path: Path) -> None:
    folder = written(tmp_path, "Flux2KleinPipeline")
    assert "width" not in call(folder, pictures=1).call
    assert call(folder, pictures=1, width=64, height=64).call["width"] == 64
    assert call(folder).call["width"] == 1024


@pytest.mark.parametrize(
    ("height", "width", "message"),
    [
        (63, 300, r"files\[1\]: expected an image with at least 64 pixels a side, found 300x63"),
        (64, 513, r"files\[1\]: expected an image with sides of at most 8 to 1, found 513x64"),
    ],
)
def test_an_input_image_that_the_class_cannot_read_is_refused(
    tmp_path: Path, height: int, width: int, message: str
) -> None:
    read = PipelineFolder.read(written(tmp_path, "Flux2KleinPipeline"))
    least = np.zeros((64, 512, 3), np.uint8)
    with pytest.raises(ClientError, match=message):
        check_pictures(read, [least, np.zeros((height, width, 3), np.uint8)])
    check_pictures(read, [least])
