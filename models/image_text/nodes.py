"""The node `encoder` of image-text encoders: token ids and pixels to embeddings in one space."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
import transformers

from models.base import EMBEDDING, Item, StatelessResult
from models.checkpoints.claims import CheckpointInfo
from models.checkpoints.files import UnsupportedArchitectureError
from models.checkpoints.progress import Progress, silent
from models.encoder_cache import EncoderCache
from models.image_text.graph import CLASSES, ENCODER, class_of
from models.text_encoder.backbone import load_model
from models.text_encoder.items import divided
from models.text_encoder.packed import PackedEncoder
from models.text_encoder.prepacked import prepack
from shared.errors import BugError

IMAGES_AT_ONCE: Final = {"cpu": 8, "cuda": 32}
"""The most images of one forward, by the kind of device."""
_OLD_END: Final = 2
MAX_NUMBERS: Final = 64 << 20
"""The most numbers in the pixels and token states of the requests of one call, unless one has more."""


def load(
    checkpoint: Path,
    node: str = ENCODER,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> "ImageTextEncoder":
    """Load both towers of a folder in Hugging Face format; the family has no `kwargs` of its own.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    if node != ENCODER:
        raise BugError(f"image_text has no node {node!r} with weights; it has {ENCODER!r}")
    name = class_of(CheckpointInfo.read(checkpoint))
    if not name:
        raise UnsupportedArchitectureError(
            f"{checkpoint}/config.json: expected one of {', '.join(CLASSES.values())} in architectures"
        )
    model = load_model(
        checkpoint, device=device, dtype=dtype, progress=progress, model_class=getattr(transformers, name)
    )
    return ImageTextEncoder(model)


class ImageTextEncoder:
    """A stateless node (`models.base.StatelessNode`) with the towers of CLIP or SigLIP.

    Attributes:
        encoder_cache: the embeddings of images, by their digest.
    """

    max_batch = 256
    max_cost = MAX_NUMBERS

    def __init__(self, model: Any) -> None:
        self.encoder_cache: Final = EncoderCache()
        self._model = model
        self._texts = PackedEncoder(model.text_model)
        self._pooled = _POOLING[type(model).__name__]
        prepack(model.vision_model)
        self._images_at_once = IMAGES_AT_ONCE.get(model.device.type, IMAGES_AT_ONCE["cuda"])

    def cost(self, item: Item) -> float:
        """The number of numbers in the pixels and in the states of the tokens of a request."""
        return item.inputs["pixels"].numel() + item.inputs["tokens"].numel() * self._texts.hidden_size

    @torch.inference_mode()
    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Embed the texts and then the images of each item: (rows, size), or (size,) of a single `text`."""
        texts = iter(self._of_texts(items))
        images = iter(self._of_images(items))
        results: list[StatelessResult | Exception] = []
        for item in items:
            rows = [*islice(texts, len(item.inputs["lengths"])), *islice(images, len(item.inputs["pixels"]))]
            found = torch.stack(rows).float()
            if item.args["params"].get("options", {}).get("normalize"):
                found = torch.nn.functional.normalize(found, dim=-1)
            is_single = item.args["inputs"].get("texts") is None and len(rows) == 1
            results.append(StatelessResult(outputs={EMBEDDING: found[0] if is_single else found}))
        return results

    def _of_texts(self, items: Sequence[Item]) -> list[torch.Tensor]:
        texts = [text for item in items for text in divided(item.inputs["tokens"], item.inputs["lengths"])]
        states = self._texts.states(texts)
        return [self._pooled(self._model, one, ids) for one, ids in zip(states, texts, strict=True)]

    def _of_images(self, items: Sequence[Item]) -> list[torch.Tensor]:
        """The embeddings of the images of all items; each image is computed once, and then kept."""
        keys = [file["digest"] for item in items for file in item.args["inputs"].get("files", ())]
        pixels = [one for item in items for one in item.inputs["pixels"]]
        return self.encoder_cache.fill(keys, lambda new: self._encoded([pixels[index] for index in new]))

    def _encoded(self, pixels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for begin in range(0, len(pixels), self._images_at_once):
            batch = torch.stack([*pixels[begin : begin + self._images_at_once]]).to(self._model.dtype)
            found += self._model.get_image_features(pixel_values=batch).pooler_output
        return found


def _of_clip(model: Any, states: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """The projected state of the token that ends the text.

    In the configurations of older checkpoints `eos_token_id` is 2, which is another token: the end of the
    text is then the token of the highest id.
    """
    end = model.text_model.eos_token_id
    last = max(ids) if end == _OLD_END else end
    place = ids.index(last) if last in ids else 0
    found: torch.Tensor = model.text_projection(states[place])
    return found


def _of_siglip(model: Any, states: torch.Tensor, _: Sequence[int]) -> torch.Tensor:
    """The last state of a text of full length, through the head of the text tower."""
    found: torch.Tensor = model.text_model.head(states[-1])
    return found


_POOLING: Final[dict[str, Callable[[Any, torch.Tensor, Sequence[int]], torch.Tensor]]] = {
    CLASSES["clip"]: _of_clip,
    CLASSES["siglip"]: _of_siglip,
}
