"""The CPU nodes of BAGEL: `prepare`, a chat to token ids and pixels, and `encode_image`, pixels to a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from models.bagel.folder import BRACKETS, EMA, SIZED, Sizes, bracket_ids, read_ema
from models.bagel.graph import BagelPrompt
from models.bagel.images import VIT, pixels_of, resized, vit_image
from models.bagel.options import MAX_SIDE, SIDE_STEP, BagelOptions
from models.bagel.prompts import (
    THINK_BEFORE_IMAGE,
    THINK_BEFORE_TEXT,
    Piece,
    ids_of_text,
    kinds_of,
    pieces_of,
    said,
)
from models.bagel.spans import Kind, Span
from models.base import CpuResult, MediaReader
from models.checkpoints.files import CheckpointError
from models.decoder_lm.processing import DecoderLmProcessing, TextFiles
from models.media.encoders import encode_image
from models.sequence_request import PrepareRequest
from models.text.chat_prompts import ChatPrompts
from models.text.prepared_prompt import prepare_prompt
from models.text.tokenizer import load_tokenizer
from models.vision_language.processing import pillow_image
from models.vision_language.visuals import Visual
from shared.errors import BugError, ClientError
from shared.events import Media, Params, digest_of
from shared.tensors import Handle, inline_ids, read_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

START: Final = "<|im_start|>"
END: Final = "<|im_end|>"
DEFAULTS: Final = Params(temperature=0.6, top_k=0, top_p=1.0, repetition_penalty=1.05)
"""The sampling of texts where a request says nothing: M*'s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLayout:
    """The layout of a checkpoint's prompts.

    Attributes:
        start, end: the tokens around a text.
        image: those around an image.
        longest_side: of an image, in pixels: the checkpoint has no positions for more.
    """

    start: int
    end: int
    image: tuple[int, int]
    longest_side: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenImage:
    """An image of a prompt for one encoder; `rows` counts the tokens around it."""

    kind: Kind
    digest: str
    pixels: npt.NDArray[np.float32]
    size: tuple[int, int]

    @property
    def rows(self) -> int:
        """The number of its tokens."""
        step = SIDE_STEP if self.kind is Kind.VAE else VIT.stride
        _, height, width = self.pixels.shape
        return int(height // step) * int(width // step) + 2

    @property
    def visual(self) -> Visual:
        """The image as its encoder gets it."""
        return Visual(digest=self.digest, shape=self.pixels.shape, rows=self.rows)


class BagelProcessing(DecoderLmProcessing):
    """The CPU nodes of one checkpoint (`models.base.Processing`). Re-entrant."""

    def __init__(
        self, text: TextFiles, layout: PromptLayout, *, media: MediaReader | None, max_seq_len: int
    ) -> None:
        super().__init__(text, max_seq_len=max_seq_len)
        self.eos_ids = (layout.end,)
        self._layout = layout
        self._media = media

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        if node == "encode_image":
            return CpuResult(
                outputs={
                    "image": encode_image(_array(inputs["image"]), args["format"], quality=args["quality"])
                }
            )
        if node != "prepare":
            raise BugError(f"bagel has no CPU node {node!r}; it has 'prepare' and 'encode_image'")
        if "token_ids" in inputs:
            return self._recalled(key, read_ids(inputs["token_ids"]), args["answer_ids"])
        return self._prepared(key, PrepareRequest.of(args))

    def _prepared(self, key: str, prepare: PrepareRequest) -> CpuResult:
        options = msgspec.convert(prepare.params.options, BagelOptions)
        wanted = set(prepare.inputs.output_modalities)
        draws = "image" in wanted
        think = (THINK_BEFORE_IMAGE if draws else THINK_BEFORE_TEXT) if options.think_mode else ""
        pieces = kinds_of(pieces_of(prepare.inputs, think_before=think), draws=draws)
        seen = self._seen(pieces, prepare.inputs.files, options)
        ids, spans = self._laid_out(pieces, seen)
        if not draws or options.think_mode or "text" in wanted:
            ids.append(self._layout.start)
        result = prepare_prompt(
            key,
            ids,
            prepare.params,
            tokenizer=self._tokenizer,
            defaults=DEFAULTS,
            check_guide=self._check_guide,
        )
        width, height = self._size(options, seen) if draws else (0, 0)
        facts = msgspec.convert(result.facts, BagelPrompt)
        facts = msgspec.structs.replace(
            facts,
            spans=spans,
            visuals=[one.visual for one in seen if one.kind is Kind.VIT],
            vae_visuals=[one.visual for one in seen if one.kind is Kind.VAE],
            width=width,
            height=height,
        )
        return CpuResult(
            facts=msgspec.to_builtins(facts),
            outputs={**result.outputs, **_pixels(seen), **_FIRST},
            guide=result.guide,
        )

    def _seen(
        self, pieces: Sequence[tuple[Kind, Piece]], files: Sequence[Media], options: BagelOptions
    ) -> list[SeenImage]:
        """The images of a prompt, in order."""
        found: list[SeenImage] = []
        for kind, piece in pieces:
            if not kind.is_image:
                continue
            medium = files[piece.file]
            image = resized(pillow_image(self._media, medium), options, largest=self._layout.longest_side)
            size = image.size
            digest = digest_of((medium.digest, str(kind), size))
            pixels = pixels_of(vit_image(image) if kind is Kind.VIT else image)
            found.append(SeenImage(kind=kind, digest=digest, pixels=pixels, size=size))
        return found

    def _laid_out(
        self, pieces: Sequence[tuple[Kind, Piece]], seen: Sequence[SeenImage]
    ) -> tuple[list[int], list[Span]]:
        """The tokens and the spans of a prompt; the tokens within an image are never embedded."""
        ids, spans, images, layout = list[int](), list[Span](), iter(seen), self._layout
        for kind, piece in pieces:
            if kind.is_image:
                image = next(images)
                begin, end = layout.image
                new, digest = [begin, *[begin] * (image.rows - 2), end], image.digest
            else:
                found = self._tokenizer.encode(piece.text, add_special_tokens=False)
                new, digest = ids_of_text(found, start=layout.start, end=layout.end), ""
            ids += new
            spans.append(Span(kind, len(new), digest))
        return ids, spans

    def _size(self, options: BagelOptions, seen: Sequence[SeenImage]) -> tuple[int, int]:
        """The width and height of the image to be drawn.

        Raises:
            ClientError: the checkpoint has no positions for so large an image.
        """
        if seen:
            return seen[-1].size
        largest = self._layout.longest_side
        size = options.width or min(MAX_SIDE, largest), options.height or min(MAX_SIDE, largest)
        if max(size) > largest:
            name = "width" if size[0] > largest else "height"
            raise ClientError(
                f"{name}: expected at most {largest}, the positions of this checkpoint, found {max(size)}",
                code="invalid_value",
            )
        return size

    def _recalled(self, key: str, prompt_ids: list[int], answer_ids: list[int]) -> CpuResult:
        """A prompt with the thought that was generated behind it, as a text like the others."""
        layout = self._layout
        thought = said(answer_ids, start=layout.start, end=layout.end)
        ids = self._tokenizer.encode(self._tokenizer.decode(thought), add_special_tokens=False)
        whole = prompt_ids[:-1] + ids_of_text(ids, start=layout.start, end=layout.end)
        return CpuResult(outputs={"token_ids": inline_ids(f"{key}/token_ids", whole)})


_FIRST: Final[dict[str, npt.NDArray[Any]]] = {
    "latents": np.zeros((0,), np.float32),
    "time_index": np.zeros((1,), np.int64),
}
"""The first inputs of a loop over ranks: no latents yet, which are drawn by the seed."""


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader | None = None) -> BagelProcessing:
    """Load the tokenizer of a checkpoint, and the sizes of its images.

    Raises:
        CheckpointError: a file is missing or malformed, or the tokenizer lacks one of BAGEL's tokens.
    """
    tokenizer, names = load_tokenizer(checkpoint)
    text = TextFiles.read(checkpoint, tokenizer, names, ChatPrompts.read(checkpoint, names))
    layout = PromptLayout(
        start=_id_of(tokenizer, START),
        end=_id_of(tokenizer, END),
        image=bracket_ids(checkpoint),
        longest_side=Sizes.of(read_ema(checkpoint, SIZED)).latent_side * SIDE_STEP,
    )
    return BagelProcessing(text, layout, media=media, max_seq_len=max_seq_len)


def _id_of(tokenizer: "Tokenizer", token: str) -> int:
    found = tokenizer.token_to_id(token)
    if found is None:
        raise CheckpointError(
            f"tokenizer.json has no token {token!r}: expected the tokenizer that was published with {EMA}, "
            f"which has {', '.join((START, END, *BRACKETS))}"
        )
    return found


def _pixels(seen: Sequence[SeenImage]) -> dict[str, npt.NDArray[np.float32]]:
    """The pixels for each encoder, flat."""

    def flat(kind: Kind) -> npt.NDArray[np.float32]:
        found = [one.pixels.ravel() for one in seen if one.kind is kind]
        return np.concatenate(found) if found else np.zeros((0,), np.float32)

    return {"pixels": flat(Kind.VIT), "vae_pixels": flat(Kind.VAE)}


def _array(handle: Handle) -> npt.NDArray[np.uint8]:
    """The pixels of an inline tensor, (height, width, 3)."""
    if handle.data is None or handle.dtype != "uint8":
        raise BugError(f"expected the bytes of pixels, found {handle.dtype} without them")
    return np.frombuffer(handle.data, np.uint8).reshape(handle.shape)
