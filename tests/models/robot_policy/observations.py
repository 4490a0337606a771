"""Observations of robots for tests: images, arrays, and what the CPU node makes of them."""

import hashlib
import io
from typing import Any

import numpy as np
from PIL import Image

from models import registry
from models.media.in_process import InProcessReader
from shared.events import Media
from tests.tiny import pi

STATE = [0.3, -2.0, 0.9, 4.0, 0.0]
FILES: dict[str, bytes] = {}


def picture(seed: int, height: int = 28, width: int = 28) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def stored(data: bytes, modality: str) -> Media:
    digest = hashlib.sha256(data).hexdigest()
    FILES[digest] = data
    return Media(modality=modality, digest=digest, size=len(data))


def png_bytes(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture(seed)).save(file, "PNG")
    return file.getvalue()


def png(seed: int) -> Media:
    return stored(png_bytes(seed), "image")


def npz(**arrays: Any) -> Media:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return stored(file.getvalue(), "tensor")


def prepared(family: str, files: list[Media], text: str = "pick up_the cup", **options: Any) -> Any:
    folder = pi.tiny_pi05() if family == "pi05" else pi.lerobot_pi0()
    reader = InProcessReader(FILES)
    processing = registry.load_processing(family, folder, max_seq_len=2048, media=reader)
    inputs = {
        "text": text,
        "files": [{"modality": one.modality, "digest": one.digest, "size": one.size} for one in files],
    }
    return processing.run("prepare", "k", {}, {"inputs": inputs, "options": options})


LEROBOT = {f"observation.images.{name}": picture(n) for n, name in enumerate(pi.CAMERAS)}
OPENPI = {
    **{f"image/{name}": picture(n) for n, name in enumerate(pi.CAMERAS)},
    "image_mask/right_wrist_0_rgb": np.array(False),
}
DROID = {
    "observation/exterior_image_1_left": picture(0),
    "observation/wrist_image_left": picture(1).transpose(2, 0, 1),
    "observation/joint_position": np.array(STATE[:4]),
    "observation/gripper_position": np.array(STATE[4]),
}
LIBERO = {"observation/image": picture(0), "observation/wrist_image": picture(1)}
