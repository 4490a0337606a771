"""Clips become the pixels of an encoder, as a checkpoint's settings say."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from models.checkpoints.files import CheckpointError
from models.media.clips import FILE, ClipReader, ClipTransform, evenly
from models.media.in_process import InProcessReader
from models.media.kinds import MediaError, VideoInfo
from shared.events import Media
from tests.models.media import samples


def info(frames: int) -> VideoInfo:
    return VideoInfo(frames=frames, fps=10.0, seconds=frames / 10, width=48, height=32)


@pytest.mark.parametrize(
    ("wanted", "frames", "chosen"), [(4, 8, [0, 2, 4, 6]), (3, 10, [0, 3, 6]), (8, 3, [0, 1, 2]), (1, 5, [0])]
)
def test_frames_are_chosen_at_equal_distances(wanted: int, frames: int, chosen: list[int]) -> None:
    assert evenly(wanted)(info(frames)) == chosen


def test_a_frame_of_one_colour_is_normalised() -> None:
    transform = ClipTransform(short=16, crop=8, mean=(0.5, 0.0, 1.0), std=(0.5, 1.0, 2.0))

    found = transform(np.full((2, 20, 40, 3), 255, np.uint8))

    assert found.shape == (2, 3, 8, 8)
    assert np.allclose(found[0, :, 3, 3], [1.0, 1.0, 0.0])


def test_the_centre_is_cut_out_also_of_a_very_long_frame() -> None:
    transform = ClipTransform(short=8, crop=8, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    long = np.zeros((1, 16, 1600, 3), np.uint8)
    long[:, :, 792:808] = 255

    assert transform(long).min() > 0.8  # its edge blends with what is beside it


def test_settings_come_from_the_folder_or_are_the_usual_ones(tmp_path: Path) -> None:
    assert ClipTransform.read(tmp_path, 256) == ClipTransform(short=292, crop=256)

    settings = {"crop_size": {"height": 384, "width": 384}, "size": {"shortest_edge": 438}}
    (tmp_path / FILE).write_text(json.dumps(settings))
    assert ClipTransform.read(tmp_path, 256) == ClipTransform(short=438, crop=384)

    (tmp_path / FILE).write_text(json.dumps({"image_mean": "grey"}))
    with pytest.raises(CheckpointError, match="video processor"):
        ClipTransform.read(tmp_path, 256)


def test_images_stand_still_and_animations_move() -> None:
    files = {"picture": samples.image("PNG"), "moving": samples.animation("GIF", frames=5)}
    reader = InProcessReader({hashlib.sha256(data).hexdigest(): data for data in files.values()})
    clips = ClipReader(media=reader, transform=ClipTransform(short=16, crop=16), frames=4)
    media = {
        name: Media(modality="image", digest=hashlib.sha256(data).hexdigest(), size=len(data))
        for name, data in files.items()
    }

    still, moving = clips.pixels(media["picture"], 3), clips.pixels(media["moving"], None)

    assert len(still) == 3
    assert np.array_equal(still[0], still[2])
    assert len(moving) == 4
    assert not np.array_equal(moving[0], moving[3])


def test_an_error_names_the_part_of_the_request() -> None:
    error = MediaError("expected a complete image")
    error.digest = "a" * 64
    files = [
        Media(modality="image", digest="b" * 64),
        Media(modality="image", digest="a" * 64, name="cat.png"),
    ]

    assert error.named(files).message == "files[1] ('cat.png'): expected a complete image"
    assert error.named(files[:1]) is error
