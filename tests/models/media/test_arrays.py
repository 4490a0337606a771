"""Arrays are read from npz, npy and safetensors files, without executing them."""

import io
import zipfile

import numpy as np
import pytest
from safetensors.numpy import save

from models.media.arrays import read_arrays
from models.media.kinds import MediaError, MediaLimits, MediaTooLargeError, UnsupportedMediaError
from tests.models.media import samples

LIMITS = MediaLimits(max_decoded_bytes=1_000_000)
STATE = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_every_format_gives_the_arrays() -> None:
    npz, npy = io.BytesIO(), io.BytesIO()
    np.savez(npz, state=STATE)
    np.save(npy, STATE)

    assert np.array_equal(read_arrays(io.BytesIO(npz.getvalue()), LIMITS)["state"], STATE)
    assert np.array_equal(read_arrays(io.BytesIO(npy.getvalue()), LIMITS)[""], STATE)
    assert np.array_equal(read_arrays(io.BytesIO(save({"state": STATE})), LIMITS)["state"], STATE)


def test_an_archive_that_expands_beyond_the_limit_is_refused() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("state.npy", bytes(10_000_000))

    with pytest.raises(MediaTooLargeError, match="10,000,000"):
        read_arrays(io.BytesIO(file.getvalue()), LIMITS)


def test_pickled_objects_and_other_files_are_refused() -> None:
    pickled = io.BytesIO()
    np.save(pickled, np.array([{"a": 1}], dtype=object), allow_pickle=True)

    with pytest.raises(MediaError, match="pickle"):
        read_arrays(io.BytesIO(pickled.getvalue()), LIMITS)
    with pytest.raises(UnsupportedMediaError, match="image/png"):
        read_arrays(io.BytesIO(samples.image("PNG")), LIMITS)


def test_another_file_in_an_archive_is_refused_by_name() -> None:
    file = io.BytesIO()
    np.savez(file, state=STATE)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("readme.txt", "hello")

    with pytest.raises(UnsupportedMediaError, match=r"found the file 'readme\.txt'"):
        read_arrays(io.BytesIO(file.getvalue()), LIMITS)
