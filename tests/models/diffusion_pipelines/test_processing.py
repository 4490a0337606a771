"""The CPU nodes of pipelines: the facts of a call, and the files that come out."""

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from models.base import CpuResult
from models.diffusion_pipelines.folder import PipelineFolder
from models.diffusion_pipelines.options import ImageOptions, VideoOptions
from models.diffusion_pipelines.processing import PipelineProcessing
from models.options import InvalidOptionError
from shared.errors import ClientError
from shared.tensors import Handle
from tests.models.diffusion_pipelines.folders import written

FRAMES = np.stack([np.full((32, 48, 3), level, np.uint8) for level in (0, 60, 120, 180, 240)])
SILENCE = np.zeros((0, 0), np.float32)


def handle(array: npt.NDArray[Any]) -> Handle:
    return Handle(key="k", dtype=str(array.dtype), shape=array.shape, data=array.tobytes())


def array_of(result: CpuResult, edge: str) -> npt.NDArray[np.uint8]:
    found = result.outputs[edge]
    assert isinstance(found, np.ndarray)
    return found


def encoded(
    frames: npt.NDArray[np.uint8] = FRAMES, sound: npt.NDArray[Any] = SILENCE, **args: Any
) -> CpuResult:
    known = {"makes": "video", "fps": 12, "format": "png", "quality": 90, "sound_rate": 0}
    inputs = {"frames": handle(frames), "sound": handle(sound)}
    return processing(Path()).run("encode_output", "k", inputs, known | args)


def processing(folder: Path, **more: Any) -> PipelineProcessing:
    read = PipelineFolder.read(folder) if folder != Path() else None
    options = VideoOptions if read is None or read.makes_videos else ImageOptions
    return PipelineProcessing(read, options, media=None, **more)  # type: ignore[arg-type]


def prepared(found: PipelineProcessing, makes: str = "image", **options: Any) -> CpuResult:
    args = {"inputs": {"text": "a cat"}, "options": options, "makes": makes}
    return found.run("prepare", "k", {}, args)


def test_the_facts_are_those_of_the_call(tmp_path: Path) -> None:
    result = prepared(processing(written(tmp_path, "ZImagePipeline")), width=64, num_inference_steps=3)
    assert result.facts["call"] == {"width": 64, "height": 1024, "num_inference_steps": 3}
    assert result.facts["makes"] == "image"


@pytest.mark.parametrize("form", ["png", "jpeg", "webp"])
def test_an_image_is_a_file_of_the_format_that_was_asked_for(form: str) -> None:
    image = Image.open(
        io.BytesIO(array_of(encoded(FRAMES[2:3], makes="image", format=form), "image").tobytes())
    )
    assert (image.format, image.size) == (form.upper(), (48, 32))
    assert abs(float(np.asarray(image).mean()) - 120) < 2


def test_a_film_is_an_mp4_of_all_frames_with_its_sound() -> None:
    tone = np.sin(np.arange(6400) / 10).astype(np.float32)[None]
    file = array_of(encoded(sound=tone, sound_rate=16_000), "video").tobytes()
    with av.open(io.BytesIO(file), "r") as film:
        video, audio = film.streams.video[0], film.streams.audio[0]
        assert (video.codec_context.name, audio.codec_context.name) == ("h264", "aac")
        assert float(video.average_rate or 0) == 12
        levels = [frame.to_ndarray(format="gray").mean() for frame in film.decode(video=0)]
    assert np.abs(np.subtract(levels, [0, 60, 120, 180, 240])).max() < 4
    with av.open(io.BytesIO(array_of(encoded(), "video").tobytes()), "r") as silent:
        assert not silent.streams.audio


def test_the_frames_of_a_film_come_one_after_the_other_as_png() -> None:
    files = array_of(encoded(each_frame=True), "files")
    for frame in FRAMES:
        step = processing(Path()).run("next_frame", "k", {"files": handle(files)}, {})
        image = Image.open(io.BytesIO(array_of(step, "image").tobytes()))
        assert image.format == "PNG"
        assert np.array_equal(np.asarray(image), frame)
        files = array_of(step, "files")


def test_a_request_names_an_adapter_of_the_deployment_and_no_path(tmp_path: Path) -> None:
    found = processing(written(tmp_path, "ZImagePipeline"), loras={"ink": tmp_path / "ink"})
    lora = prepared(found, lora="ink", lora_scale=0.5).facts["lora"]
    assert lora == {"path": str(tmp_path / "ink"), "scale": 0.5}
    with pytest.raises(InvalidOptionError, match="lora: expected one of ink, found '/etc'"):
        prepared(found, lora="/etc")


def test_a_request_that_does_not_fit_into_memory_is_refused_by_name(tmp_path: Path) -> None:
    folder = written(tmp_path, "ZImagePipeline")
    assert prepared(processing(folder, memory=1 << 33)).facts["call"]
    with pytest.raises(ClientError, match=r"1024 x 1024 pixels: it needs about .* GiB") as refused:
        prepared(processing(folder, memory=1 << 20))
    assert refused.value.code == "memory_exceeded"
    assert prepared(processing(folder, memory=1 << 27), width=64, height=64).facts["call"]


def test_a_pipeline_that_has_made_no_picture_is_refused() -> None:
    with pytest.raises(ClientError, match="made no picture"):
        encoded(np.zeros((0, 0, 0, 3), np.uint8), makes="image")
