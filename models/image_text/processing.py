"""The CPU node `prepare` of image-text encoders: texts to token ids, images to pixels. No torch of its own.

SigLIP was trained on texts that are padded to a fixed length without a mask, so its texts are padded here.
CLIP's need no padding: the tower is causal, and the embedding is the state of the token that ends a text.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from models.base import EMBEDDING, TEXT, CpuResult, MediaReader, TextlessProcessing
from models.checkpoints.claims import CheckpointInfo
from models.checkpoints.files import CheckpointError, text_config
from models.image_text.graph import CLASSES, IMAGE, PREPARE, ImageTextOptions, class_of
from models.text.embedding import DimensionsNotSupportedError
from models.text.tokenizer import load_tokenizer, vocab_size_of
from models.text_encoder import requests
from models.text_encoder.requests import TextsRequest
from models.text_encoder.tokens import Side, TextTokenizer, lower_cased
from models.vision_language.images import ImageAdapter
from shared.errors import BugError, ClientError
from shared.events import Inputs, Media, Params
from shared.tensors import Handle

_LENGTHS: Final = {CLASSES["clip"]: 77, CLASSES["siglip"]: 64}
_SIZES: Final = {CLASSES["clip"]: 512, CLASSES["siglip"]: 768}
_LOWER_CASE: Final = ("Siglip2Tokenizer", "Siglip2TokenizerFast")
"""Tokenizer classes that make texts lower-case, whatever their file says."""


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader | None = None) -> "ImageTextProcessing":
    """Load the tokenizer and the image processor of a folder.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    info = CheckpointInfo.read(checkpoint)
    config, of_tokenizer = text_config(info.config), info.read_json("tokenizer_config.json")
    tokenizer, names = load_tokenizer(checkpoint)
    if of_tokenizer.get("tokenizer_class") in _LOWER_CASE:
        tokenizer = lower_cased(tokenizer)
    kind = class_of(info)
    longest = int(config.get("max_position_embeddings", _LENGTHS.get(kind, 77)))
    padding = None
    if kind == CLASSES["siglip"]:
        padding = tokenizer.token_to_id(names.get("pad_token", "</s>"))
        if padding is None:
            raise CheckpointError(
                f"{checkpoint}/tokenizer_config.json: expected a pad_token of the tokenizer"
            )
    return ImageTextProcessing(
        TextTokenizer(tokenizer, vocab_size=vocab_size_of(checkpoint, tokenizer)),
        ImageAdapter(checkpoint, media, image_token=""),
        longest=longest if padding is not None else min(longest, max_seq_len),
        size=_size_of(info.config, kind),
        padding=padding,
        pads_left=of_tokenizer.get("padding_side") == "left",
    )


def _size_of(config: Mapping[str, Any], kind: str) -> int:
    """The dimensions of an embedding: of the projections, or of SigLIP's towers."""
    own = text_config(config)
    if kind == CLASSES["clip"]:
        return int(config.get("projection_dim", _SIZES[kind]))
    return int(own.get("projection_size", own.get("hidden_size", _SIZES[CLASSES["siglip"]])))


class ImageTextProcessing(TextlessProcessing):
    """The CPU node of one folder. Re-entrant.

    Its outputs are `tokens`, (T,) int32, the token ids of all texts, `lengths`, (texts,) int32, and `pixels`,
    (images, 3, H, W) float32.

    Args:
        longest: the most tokens of a text.
        size: the dimensions of an embedding.
        padding: the token that texts are padded with to `longest`; None: they are not.
        pads_left: the padding is before the text.
    """

    def __init__(
        self,
        texts: TextTokenizer,
        images: ImageAdapter,
        *,
        longest: int,
        size: int,
        padding: int | None,
        pads_left: bool,
    ) -> None:
        self._texts = texts
        self._images = images
        self._longest = longest
        self._size = size
        self._padding = padding
        self._pads_left = pads_left

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        if node != PREPARE:
            raise BugError(f"image_text has no CPU node {node!r}; it has {PREPARE!r}")
        request, _ = requests.read(args, ImageTextOptions)
        _check(request.inputs, request.params)
        self._check_dimensions(request.params.dimensions)
        ids = self._ids(request)
        pixels = self._pixels(request.inputs.files)
        padded = [self._padded(one) for one in ids]
        return CpuResult(
            facts={"prompt_tokens": sum(map(len, ids))},
            outputs={
                "tokens": np.fromiter((id for one in padded for id in one), np.int32),
                "lengths": np.array([len(one) for one in padded], np.int32),
                "pixels": pixels,
            },
        )

    def _ids(self, request: TextsRequest) -> list[list[int]]:
        texts, names = requests.texts_of(request.inputs)
        limit, side = self._limit(request.params)
        return self._texts.encode(texts, limit=limit, cut=side, names=names)

    def _padded(self, ids: list[int]) -> list[int]:
        if self._padding is None:
            return ids
        padding = [self._padding] * (self._longest - len(ids))
        return padding + ids if self._pads_left else ids + padding

    def _pixels(self, files: Sequence[Media]) -> npt.NDArray[np.float32]:
        """The pixels of images, (images, 3, H, W)."""
        if not files:
            return np.zeros((0, 3, 1, 1), np.float32)
        found = [np.asarray(self._images.processed(one)["pixel_values"], np.float32) for one in files]
        return np.concatenate(found)

    def _limit(self, params: Params) -> tuple[int, Side]:
        """The most tokens of a text, and the end at which longer ones are cut."""
        wanted = requests.truncated_to(params, self._longest)
        side = params.truncation_side or self._texts.side
        return (self._longest if wanted is None else wanted), side

    def _check_dimensions(self, wanted: int | None) -> None:
        if wanted not in (None, self._size):
            raise DimensionsNotSupportedError(
                f"dimensions: expected {self._size}, all that this model has, found {wanted}"
            )


def _check(inputs: Inputs, params: Params) -> None:
    """Refuse what an image-text encoder cannot do.

    Raises:
        ClientError: the request asks for something else than embeddings of texts and images.
    """
    requests.refuse_chats(inputs, does="embeds texts and images", expected="text, texts or files")
    others = {file.modality for file in inputs.files} - {IMAGE} or set(inputs.input_modalities) - {
        TEXT,
        IMAGE,
    }
    if others:
        raise ClientError(
            f"this model reads text and images, and no {', '.join(sorted(others))}",
            code="unsupported_modality",
        )
    requests.refuse_queries(inputs, params, does="embeds texts and images")
    requests.refuse_outputs(inputs, {EMBEDDING}, makes="embeddings")
    requests.refuse_generation(params, result="an embedding is")
