"""The CPU node `prepare` of vision-language models: messages and media -> token ids, pixels and parts.

A request without media is prepared as a language model's (`models.decoder_lm.processing`). A family defines
an `Adapter`: what its chat template writes for a medium, and what a medium becomes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from models.base import CpuResult, MediaReader
from models.checkpoints.files import CheckpointError
from models.decoder_lm.processing import DecoderLmProcessing, TextFiles
from models.sequence_request import PrepareRequest, PromptPart
from models.text.tokenizer import load_tokenizer
from models.vision_language.chats import MediaChatPrompts, placed, with_messages
from models.vision_language.expansion import PlacedMedium, Seen, expanded, parts_of, placeholders_in
from models.vision_language.visuals import Visual
from shared.errors import BugError, ClientError
from shared.events import Inputs, Media
from shared.tensors import Handle

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Adapter(Protocol):
    """A family's part of `prepare`. Re-entrant.

    Attributes:
        placeholders: by modality, the text that the chat template writes for a medium.
        row_tokens: the tokens whose embeddings are replaced by rows, as text.
    """

    @property
    def placeholders(self) -> Mapping[str, str]: ...
    @property
    def row_tokens(self) -> frozenset[str]: ...

    def see(self, medium: Media, options: Mapping[str, Any]) -> Seen:
        """Decode a medium, and make its pixels and its text. `options` are the family's own parameters.

        Raises:
            ClientError: the medium cannot be used.
        """
        ...


class VisionLanguageProcessing(DecoderLmProcessing):
    """The CPU nodes of one checkpoint (`models.base.Processing`). Re-entrant."""

    def __init__(self, text: TextFiles, adapter: Adapter, *, bos_token: str | None, max_seq_len: int) -> None:
        super().__init__(text, max_seq_len=max_seq_len)
        self._adapter = adapter
        self._bos_token = bos_token
        self._row_ids: Final = frozenset(_ids_of(text.tokenizer, adapter.row_tokens))

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        prepare = PrepareRequest.of(args)
        if not prepare.inputs.files:
            placed(prepare.inputs)
            return super().run(node, key, inputs, args)
        if node != "prepare":
            raise BugError(f"expected the CPU node 'prepare', found {node!r}")
        return self._with_media(key, msgspec.structs.replace(prepare, inputs=with_messages(prepare.inputs)))

    def encode(self, request: Inputs, text: str) -> list[int]:
        # As transformers' processors do, which differ from its tokenizers: a template may leave the first
        # special token to the tokenizer.
        has_bos = self._bos_token is not None and text.startswith(self._bos_token)
        return self._tokenizer.encode(text, add_special_tokens=not has_bos)

    def parts(self, ids: Sequence[int], media: Sequence[PlacedMedium]) -> list[PromptPart]:
        """The parts of a prompt: the runs of row tokens."""
        return parts_of(ids, self._row_ids, media)

    def _with_media(self, key: str, prepare: PrepareRequest) -> CpuResult:
        request = prepare.inputs
        self._check_modalities(request)
        order = placed(request)
        text = self._prompts.text_of(request)
        if text is None:
            raise ClientError("expected messages or a text together with files, found token ids")
        found, around = placeholders_in(text, self._adapter.placeholders, [kind for kind, _ in order])
        media = self._seen(request.files, order, found, prepare.params.options)
        text = expanded(around, media)
        ids = self.encode(request, text)
        parts = self.parts(ids, media)
        result = self.prepared(key, prepare, ids, text)
        facts, arrays = self.laid_out(parts, media)
        return CpuResult(
            facts={**result.facts, **facts}, outputs={**result.outputs, **arrays}, guide=result.guide
        )

    def laid_out(
        self, parts: Sequence[PromptPart], media: Sequence[PlacedMedium]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The facts about the media of a prompt, and their arrays, by edge."""
        facts = {
            "parts": msgspec.to_builtins(parts),
            "visuals": [msgspec.to_builtins(visual_of(medium)) for medium in media],
        }
        return facts, {"pixels": pixels_of(media)}

    def _seen(
        self, files: list[Media], order: list[tuple[str, int]], found: list[str], options: Mapping[str, Any]
    ) -> list[PlacedMedium]:
        """The processed media, in the order of their placeholders; each file is processed once."""
        waiting = {kind: iter([number for one, number in order if one == kind]) for kind in set(found)}
        seen: dict[int, Seen] = {}
        placed = []
        for kind in found:
            number = next(waiting[kind])
            if number not in seen:
                seen[number] = self._adapter.see(files[number], options)
            placed.append(PlacedMedium(modality=kind, medium=files[number].digest, seen=seen[number]))
        return placed

    def _check_modalities(self, request: Inputs) -> None:
        known = self._adapter.placeholders
        for number, medium in enumerate(request.files):
            if medium.modality not in known:
                raise ClientError(
                    f"files[{number}]: this model reads text and {' and '.join(sorted(known))}; found "
                    f"{medium.modality!r}",
                    code="unsupported_modality",
                )


def read_processing(checkpoint: Path, adapter: Adapter, *, max_seq_len: int) -> VisionLanguageProcessing:
    """Load the tokenizer, the chat templates and the defaults of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
        ChatTemplateError: a chat template is no valid Jinja.
    """
    tokenizer, names = load_tokenizer(checkpoint)
    text = TextFiles.read(checkpoint, tokenizer, names, MediaChatPrompts.read(checkpoint, names))
    return VisionLanguageProcessing(text, adapter, bos_token=names.get("bos_token"), max_seq_len=max_seq_len)


def read_image_processor(checkpoint: Path, **overrides: Any) -> Any:
    """Transformers' own image processor of a checkpoint: the one that computes with pillow and numpy.

    `overrides` are settings that the family's processor in transformers sets itself.

    Raises:
        CheckpointError: its file is missing or malformed.
    """
    from transformers import AutoImageProcessor  # noqa: PLC0415 - heavy: it imports torch

    try:
        return AutoImageProcessor.from_pretrained(
            str(checkpoint), backend="pil", local_files_only=True, trust_remote_code=False, **overrides
        )
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise CheckpointError(
            f"{checkpoint}: expected the settings of an image processor in preprocessor_config.json or "
            f"processor_config.json: {' '.join(str(error).split()):.300}"
        ) from error


def pillow_image(media: MediaReader | None, medium: Media) -> Any:
    """Decode an image to a pillow image in RGB, which image processors take."""
    from PIL import Image  # noqa: PLC0415 - only for media

    return Image.fromarray(reader_of(media).image(medium))


def reader_of(media: MediaReader | None) -> MediaReader:
    """The reader that a processing was loaded with."""
    if media is None:
        raise BugError("the processing was loaded without a reader of media, and got a medium")
    return media


def _ids_of(tokenizer: "Tokenizer", tokens: frozenset[str]) -> list[int]:
    ids = {token: tokenizer.token_to_id(token) for token in tokens}
    missing = sorted(token for token, token_id in ids.items() if token_id is None)
    if missing:
        raise CheckpointError(
            f"tokenizer.json has no token {missing[0]!r}, which stands for media; use the tokenizer that was "
            "published with the weights"
        )
    return [token_id for token_id in ids.values() if token_id is not None]


def visual_of(medium: PlacedMedium) -> Visual:
    """A medium as its tower gets it."""
    seen = medium.seen
    return Visual(
        digest=medium.digest,
        shape=seen.pixels.shape,
        rows=seen.rows,
        grid=seen.grid,
        modality=medium.modality,
    )


def pixels_of(media: Sequence[PlacedMedium]) -> Any:
    """The pixels of media one after the other, (n,) float32."""
    import numpy as np  # noqa: PLC0415 - only for media

    return np.concatenate([medium.seen.pixels.ravel() for medium in media]).astype(np.float32, copy=False)
