"""The nodes of an image-text encoder without a worker, and transformers' own model as their oracle."""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import transformers
from PIL import Image

from models.base import EMBEDDING, Item
from models.image_text import nodes, processing
from models.media.in_process import InProcessReader
from models.text_encoder.requests import TextsRequest
from shared.events import Inputs, Media, Params
from tests.models.media import samples
from tests.tiny.image_text import tiny_image_text

Vectors = npt.NDArray[np.float32]
TEXTS = ["a red cat", "dog", "", "a dog on a mat w1 w2 w3 w4 w5", "a red cat"]
IMAGES = [samples.image("PNG", samples.picture(60 + 20 * n, 40, shift=n)) for n in range(3)]


def medium(data: bytes) -> Media:
    return Media(modality="image", digest=hashlib.sha256(data).hexdigest(), size=len(data))


def reader() -> InProcessReader:
    return InProcessReader({medium(data).digest: data for data in IMAGES})


class Encoder:
    """The two nodes of a folder."""

    def __init__(self, name: str, *, folder: Path | None = None) -> None:
        at = folder or tiny_image_text(name)
        self.processing = processing.load(at, max_seq_len=77, media=reader())
        self.node = nodes.load(at)

    def item(
        self,
        texts: Sequence[str | list[int]] | str,
        images: Sequence[bytes] = (),
        params: Params | None = None,
        **options: Any,
    ) -> Item:
        """The item of a request: of several texts and images, or of a single text."""
        given = {"text": texts} if isinstance(texts, str) else {"texts": [*texts]}
        inputs = Inputs(**given, files=[medium(data) for data in images], output_modalities=[EMBEDDING])
        chosen = msgspec.structs.replace(params or Params(), options=options)
        args = msgspec.to_builtins(TextsRequest(inputs=inputs, params=chosen))
        result = self.processing.run("prepare", "key", {}, args)
        return Item(inputs={name: torch.from_numpy(one) for name, one in result.outputs.items()}, args=args)

    def run(self, *items: Item) -> list[Vectors]:
        return [result.outputs[EMBEDDING].numpy() for result in self.node.run(items)]  # type: ignore[union-attr]

    def embed(self, *given: Any, **options: Any) -> Vectors:
        [found] = self.run(self.item(*given, **options))
        return found


@cache
def model(name: str) -> Any:
    kind = transformers.SiglipModel if name == "siglip" else transformers.CLIPModel
    return kind.from_pretrained(tiny_image_text(name)).eval()


def text_features(name: str, texts: Sequence[str]) -> Vectors:
    """`get_text_features` of texts that the folder's tokenizer cuts, padded as the model was trained."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_image_text(name))
    padding = {"padding": "max_length", "max_length": 16} if name == "siglip" else {"padding": True}
    found = tokenizer([*texts], truncation=True, return_tensors="pt", **padding)
    if name == "siglip":
        del found["attention_mask"]
    found.pop("token_type_ids", None)
    with torch.inference_mode():
        return np.asarray(model(name).get_text_features(**found).pooler_output)


def image_features(name: str, images: Sequence[bytes]) -> Vectors:
    """`get_image_features` of images, by the folder's image processor."""
    process = transformers.AutoImageProcessor.from_pretrained(tiny_image_text(name), backend="pil")
    pictures = [Image.fromarray(reader().image(medium(data))) for data in images]
    with torch.inference_mode():
        pixels = process(images=pictures, return_tensors="pt")["pixel_values"]
        return np.asarray(model(name).get_image_features(pixel_values=pixels).pooler_output)
