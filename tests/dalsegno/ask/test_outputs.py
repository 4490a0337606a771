import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dalsegno.ask.outputs import save_outputs
from dalsegno.client import Answer, Chunk
from shared.errors import ClientError

NUMBERS = np.array([[1, 2], [3, 4]], np.float32)


def answer(*chunks: tuple[str, bytes, dict[str, Any]]) -> Answer:
    whole = Answer("r")
    for index, (modality, data, metadata) in enumerate(chunks):
        whole.take(Chunk(index=index, modality=modality, data=data, metadata=metadata))
    return whole


def test_each_kind_of_output_gets_a_file_of_its_kind(tmp_path: Path) -> None:
    pcm = {"dtype": "int16", "shape": [2], "sample_rate": 8000, "num_channels": 1}
    found = answer(
        ("image", b"a png", {"dtype": "uint8", "shape": [5], "content_type": "image/png"}),
        ("image", b"a webp", {"dtype": "uint8", "shape": [6], "content_type": "image/webp"}),
        ("audio", b"\1\0\2\0", pcm),
        ("audio", b"\3\0\4\0", pcm),
        ("features", NUMBERS.tobytes(), {"dtype": "float32", "shape": [2, 2]}),
        ("video", b"an mp4", {"content_type": "video/mp4"}),
        ("blob", b"?", {}),
    )
    saved = save_outputs(found, tmp_path / "new")
    assert [path.name for path in saved] == [
        "image-0.png", "image-1.webp", "audio.wav", "features-0.npy", "video-0.mp4", "blob-0.bin",
    ]  # fmt: skip
    assert saved[0].read_bytes() == b"a png"
    assert np.array_equal(np.load(saved[3]), NUMBERS)
    with wave.open(str(saved[2])) as sound:
        assert (sound.getframerate(), sound.readframes(9)) == (8000, b"\1\0\2\0\3\0\4\0")


def test_a_server_cannot_name_a_file_outside_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="expected the name of a modality"):
        save_outputs(answer(("../../secret", b"x", {})), tmp_path)


def test_a_medium_that_is_no_tensor_says_so() -> None:
    [image] = answer(("image", b"x", {"content_type": "image/png"})).images
    with pytest.raises(ClientError, match="expected a tensor with dtype and shape, found image/png"):
        image.numpy()
