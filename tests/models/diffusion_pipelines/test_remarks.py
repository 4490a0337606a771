"""Remarks of `dalsegno check` on a pipeline's folder, and the estimate of memory that they rest on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from models import registry
from models.checkpoints.files import CheckpointError
from models.diffusion_pipelines import remarks
from models.diffusion_pipelines.folder import PipelineFolder
from models.diffusion_pipelines.memory import limit_of, request_bytes
from models.diffusion_pipelines.options import VideoOptions
from models.diffusion_pipelines.requests import pipeline_call
from tests.models.diffusion_pipelines.folders import written


def said(family: str, folder: Path, **kwargs: Any) -> str:
    found = registry.graph(family).remarks
    assert found is not None
    return "\n".join(found(folder, kwargs))


def test_a_class_that_is_not_known_is_said_to_run_as_one_node(tmp_path: Path) -> None:
    whole = "KolorsPipeline is no class that is served in parts: this pipeline runs as one node"
    assert whole in said("whole_pipeline", written(tmp_path / "a", "KolorsPipeline"))
    assert "one node" not in said("image_pipeline", written(tmp_path / "b", "ZImagePipeline"))


def test_the_state_of_a_safety_checker_is_said(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", "StableDiffusionPipeline", safety_checker={})
    assert "the safety checker is on" in said("whole_pipeline", folder)
    assert "the safety checker is off" in said("whole_pipeline", folder, safety_checker=False)
    assert "safety" not in said("whole_pipeline", written(tmp_path / "b", "KolorsPipeline"))
    cosmos = {"enable_safety_checker": False}
    assert "is on" in said("cosmos3", written(tmp_path / "c", "Cosmos3OmniPipeline"))
    assert "is off" in said("cosmos3", written(tmp_path / "d", "Cosmos3OmniPipeline", cosmos))


def test_the_memory_of_the_usual_request_is_said(tmp_path: Path) -> None:
    wan = said("video_pipeline", written(tmp_path, "WanPipeline"))
    assert "the usual video of 81 frames, 1280 x 704, takes about" in wan


def test_parts_without_weights_are_named_and_damaged_ones_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, "ZImagePipeline")
    assert "weights of" not in said("image_pipeline", folder), "a machine that plans may have none"
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({"x": np.zeros(4096, np.float32)}, file)
    assert "has none here, so a node that loads it does not start" in said("image_pipeline", folder)
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"diffusion_pytorch_model.safetensors"):
        said("image_pipeline", folder)


@pytest.mark.parametrize("library", ["diffusers", "greenlet"])
def test_without_the_extra_the_folder_is_refused_and_the_extra_named(
    tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remarks, "find_spec", lambda name: None if name == library else True)
    with pytest.raises(CheckpointError, match=rf"{library} is not installed .*dalsegno\[diffusers\]"):
        said("image_pipeline", written(tmp_path, "ZImagePipeline"))


def test_more_frames_and_pixels_take_more_memory_and_tiles_take_less(tmp_path: Path) -> None:
    folder = PipelineFolder.read(written(tmp_path, "WanPipeline"))

    def needed(*, tiled: bool = False, **options: Any) -> int:
        call = pipeline_call(folder, VideoOptions(**options), makes="video", pictures=0)
        return request_bytes(folder, call, tiled=tiled)

    assert needed(num_frames=81) > needed(num_frames=41) > needed(num_frames=41, width=640)
    few: dict[str, Any] = {"num_frames": 5}
    assert needed(**few) > needed(**few, tiled=True) > 0


def test_the_limit_is_what_the_weights_leave_of_the_device(tmp_path: Path) -> None:
    folder = PipelineFolder.read(written(tmp_path, "KolorsPipeline"))
    assert limit_of(folder, {"request_memory_gb": 2}, 1 << 20) == 2 << 30
    assert limit_of(folder, {}, None) is None
    assert limit_of(folder, {}, 1 << 30) == 1 << 30
