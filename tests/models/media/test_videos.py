"""Chosen frames of videos are decoded as PyAV decodes them, in every container."""

import io
from collections.abc import Sequence

import av
import numpy as np
import pytest

from models.media.chosen_frames import read_video
from models.media.kinds import (
    ChooseFrames,
    MediaError,
    MediaLimits,
    MediaTooLargeError,
    UnsupportedMediaError,
    Video,
    VideoInfo,
)
from models.media.videos import open_video
from tests.models.media import samples

LIMITS = MediaLimits(max_pixels=1_000_000, max_seconds=60.0)


def read(data: bytes, choose: ChooseFrames, limits: MediaLimits = LIMITS) -> Video:
    with open_video(io.BytesIO(data), limits) as source:
        return read_video(source, choose, limits)


def every_third(info: VideoInfo) -> Sequence[int]:
    return range(0, info.frames, 3)


@pytest.mark.parametrize("container", samples.VIDEOS)
def test_the_chosen_frames_are_those_that_pyav_decodes(container: str) -> None:
    data = samples.video(container)
    with av.open(io.BytesIO(data), "r") as opened:
        expected = [frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)]

    found = read(data, every_third)

    assert found.indices == (0, 3, 6, 9)
    assert np.array_equal(found.frames, np.stack(expected[::3]))
    assert np.allclose(found.seconds, [0.0, 0.3, 0.6, 0.9])
    assert (found.info.frames, found.info.width, found.info.height) == (12, 48, 32)
    assert found.info.fps == pytest.approx(10)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animated_image_is_a_video(kind: str) -> None:
    found = read(samples.animation(kind, frames=5), lambda info: [0, 2, 2, info.frames - 1])

    assert found.frames.shape == (4, 32, 48, 3)
    assert np.array_equal(found.frames[1], found.frames[2])
    assert [round(float(frame[..., 2].mean()), -1) for frame in found.frames] == [40, 60, 60, 80]
    assert np.allclose(found.seconds, [0.0, 0.2, 0.2, 0.4])
    assert found.info.fps == pytest.approx(10)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_frames_of_an_animation_may_last_unlike_long(kind: str) -> None:
    found = read(samples.animation(kind, frames=10, first_ms=1000), lambda _: [0, 1, 9])

    assert np.allclose(found.seconds, [0.0, 1.0, 1.8])
    assert found.info.fps == pytest.approx(10 / 1.9, rel=0.02)


@pytest.mark.parametrize("kind", ["WEBP", "PNG"])
def test_an_animation_that_lasts_too_long_is_refused(kind: str) -> None:
    limits = MediaLimits(max_pixels=1_000_000, max_seconds=1.5)

    with pytest.raises(MediaTooLargeError, match=r"at most 1.5 s \(media.max_seconds\)"):
        read(samples.animation(kind, frames=10, first_ms=1000), every_third, limits)


def test_an_image_is_a_video_of_one_frame() -> None:
    found = read(samples.image("PNG"), lambda info: [0] * 4)

    assert found.info.frames == 1
    assert all(np.array_equal(frame, samples.picture()) for frame in found.frames)


def test_frames_are_chosen_again_if_the_file_has_fewer_than_it_states() -> None:
    seen = []

    def last(info: VideoInfo) -> Sequence[int]:
        seen.append(info.frames)
        return [info.frames - 1]

    class Short:
        """A source whose last two frames are missing."""

        info = VideoInfo(frames=5, fps=10.0, seconds=0.5, width=48, height=32)
        seen = 0

        def frames(self, indices: Sequence[int]):  # type: ignore[no-untyped-def]  # noqa: ANN202
            for self.seen in range(1, 4):
                if self.seen - 1 in indices:
                    yield 0.1 * self.seen, samples.picture(shift=self.seen)

    found = read_video(Short(), last, LIMITS)

    assert seen == [5, 3]
    assert found.indices == (2,)


def test_a_video_that_is_too_long_is_refused_by_its_header() -> None:
    with pytest.raises(MediaTooLargeError, match="max_seconds"):
        read(samples.video("mp4"), every_third, MediaLimits(max_seconds=1.0))


def test_frames_beyond_a_limit_are_refused() -> None:
    with pytest.raises(MediaTooLargeError, match="max_frames"):
        read(samples.video("mp4"), lambda info: [0] * 9, MediaLimits(max_frames=8))
    with pytest.raises(MediaTooLargeError, match="together"):
        read(samples.video("mp4"), every_third, MediaLimits(max_decoded_bytes=9_000))
    with pytest.raises(MediaTooLargeError, match="pixels"):
        read(samples.video("mp4"), every_third, MediaLimits(max_pixels=1_000))


def test_a_gif_of_too_many_frames_is_refused() -> None:
    with pytest.raises(MediaTooLargeError, match="max_seconds"):
        read(samples.gif_of_pixels(1_000), every_third, MediaLimits(max_seconds=1.0))


def test_audio_is_no_video() -> None:
    with pytest.raises(UnsupportedMediaError, match="video"):
        read(samples.audio("ipod"), every_third)


@pytest.mark.parametrize("container", samples.VIDEOS)
def test_a_truncated_video_is_refused_or_has_fewer_frames(container: str) -> None:
    data = samples.video(container)
    whole = read(data, lambda info: [info.frames - 1])

    try:
        found = read(data[: len(data) // 2], lambda info: [info.frames - 1])
    except MediaError:
        return
    assert found.info.frames < whole.info.frames
