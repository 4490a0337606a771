"""The folder of a pipeline: its class and the scale of its latents, without its library."""

from pathlib import Path

import pytest

from models.checkpoints.files import CheckpointError
from models.diffusion_pipelines.folder import PipelineFolder
from tests.models.diffusion_pipelines.folders import IMAGE_VAE, WAN22_VAE, written


def test_the_scale_of_latents_follows_from_the_vae(tmp_path: Path) -> None:
    image = PipelineFolder.read(written(tmp_path / "image", "ZImagePipeline"))
    wan22 = PipelineFolder.read(written(tmp_path / "wan22", "WanPipeline", vae=WAN22_VAE))
    wan21 = PipelineFolder.read(
        written(tmp_path / "wan21", "WanPipeline", vae={"temperal_downsample": [False, True, True]})
    )
    assert (image.image_scale, wan22.video_scale, wan21.video_scale) == (8, 16, 8)
    assert image.config("vae") == IMAGE_VAE


def test_a_part_that_a_folder_lacks_has_an_empty_configuration(tmp_path: Path) -> None:
    assert PipelineFolder.read(written(tmp_path, "FluxPipeline")).config("transformer_2") == {}


@pytest.mark.parametrize("kind", ["CogVideoXPipeline", "MochiPipeline", "WanVACEPipeline"])
def test_a_class_that_is_not_known_makes_videos_if_its_name_says_so(tmp_path: Path, kind: str) -> None:
    assert PipelineFolder.read(written(tmp_path / "film", kind)).makes_videos
    assert not PipelineFolder.read(written(tmp_path / "image", "KolorsPipeline")).makes_videos


def test_a_folder_without_an_index_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model_index\.json"):
        PipelineFolder.read(tmp_path)
