"""The CPU node `prepare` of models that think and talk: a chat with images, videos and sound."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from models.base import CpuResult, MediaReader
from models.decoder_lm.processing import TextFiles
from models.media.kinds import MediaError, MediaTooLargeError, UnsupportedMediaError
from models.omni.films import FilmTokens, apart, parts_of_films
from models.omni.options import OmniOptions
from models.omni.prepared import AUDIO
from models.omni.sounds import Hearing
from models.omni.speech_prompts import TalkerPrompts
from models.qwen2_5_vl.processing import Qwen2VideoRules
from models.sequence_request import PrepareRequest, PromptPart
from models.text.tokenizer import load_tokenizer
from models.vision_language.chats import MediaChatPrompts
from models.vision_language.expansion import PlacedMedium, Seen
from models.vision_language.grids import GridAdapter
from models.vision_language.processing import VisionLanguageProcessing, pixels_of, reader_of, visual_of
from shared.events import Inputs, Media, Params
from shared.tensors import Handle, inline_ids, read_ids

PUBLISHED: Final = Params(temperature=0.7, top_p=0.9)
"""M*'s defaults for the text, where the checkpoint's `generation_config.json` says nothing."""


def read_omni(
    checkpoint: Path, adapter: "OmniAdapter", speech: TalkerPrompts, *, max_seq_len: int
) -> "OmniProcessing":
    """Load the CPU nodes of a checkpoint, with a family's media and its talker's prompts.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    tokenizer, names = load_tokenizer(checkpoint)
    text = TextFiles.read(checkpoint, tokenizer, names, MediaChatPrompts.read(checkpoint, names))
    return OmniProcessing(
        replace(text, defaults=_over(text.defaults, PUBLISHED)),
        adapter,
        speech,
        bos_token=names.get("bos_token"),
        max_seq_len=max_seq_len,
    )


class OmniAdapter(GridAdapter):
    """Images and videos as grids, and sound as spectrograms."""

    def __init__(
        self,
        checkpoint: Path,
        media: MediaReader | None,
        hearing: Hearing,
        tokens: FilmTokens,
        *,
        image_token: str,
        size: Mapping[str, int],
        max_tokens: int,
    ) -> None:
        rules = Qwen2VideoRules(tokens.video)
        super().__init__(checkpoint, media, rules, size=size, max_tokens=max_tokens, image_token=image_token)
        self.placeholders = {"image": self.token, "video": tokens.video, AUDIO: tokens.audio}
        self.row_tokens = frozenset(self.placeholders.values())
        self._hearing: Final = hearing
        self._tokens: Final = tokens
        self._max_rows: Final = max_tokens

    def see(self, medium: Media, options: Mapping[str, Any]) -> Seen:
        if medium.modality == AUDIO:
            return self._hear(medium)
        seen = super().see(medium, {name: options[name] for name in _FRAME_OPTIONS if name in options})
        if medium.modality != "video" or not options.get("use_audio_in_video"):
            return seen
        try:
            return self._tokens.film(seen, self._hear(medium))
        except UnsupportedMediaError as error:
            silent = UnsupportedMediaError(f"use_audio_in_video: {error}; leave it out for a silent video")
            silent.digest = medium.digest
            raise silent from error

    def _hear(self, medium: Media) -> Seen:
        """The sound of a medium."""
        samples = reader_of(self._media).audio(medium, rate=self._hearing.rate)
        rows = self._rows(medium, len(samples))
        heard = self._hearing.spectrogram(samples)
        return Seen(pixels=heard, text=self._tokens.audio * rows, rows=rows, grid=(heard.shape[1],))

    def _rows(self, medium: Media, samples: int) -> int:
        """The rows of so many samples of a medium.

        Raises:
            MediaError: they are too many, or none.
        """
        hearing, rows = self._hearing, self._hearing.rows(samples)
        error: MediaError | None = None
        if hearing.most is not None and samples > hearing.most:
            error = MediaTooLargeError(
                f"audio of {samples / hearing.rate:.2f} s, expected at most {hearing.most / hearing.rate:g} "
                "s: send a part of it"
            )
        elif not 0 < rows <= self._max_rows:
            error = (MediaTooLargeError if rows else MediaError)(
                f"audio of {samples / hearing.rate:.2f} s makes {rows} tokens, expected from 1 to "
                f"{self._max_rows}: send {'a part of it' if rows else 'a longer one'}"
            )
        if error is not None:
            error.digest = medium.digest
            raise error
        return rows


class OmniProcessing(VisionLanguageProcessing):
    """The CPU nodes of one checkpoint (`models.base.Processing`). Re-entrant."""

    def __init__(
        self,
        text: TextFiles,
        adapter: OmniAdapter,
        speech: TalkerPrompts,
        *,
        bos_token: str | None,
        max_seq_len: int,
    ) -> None:
        super().__init__(text, adapter, bos_token=bos_token, max_seq_len=max_seq_len)
        self._speech: Final = speech

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        prepare = PrepareRequest.of(args)
        if AUDIO not in prepare.inputs.output_modalities:
            result = super().run(node, key, inputs, _plain(prepare, prepare.inputs))
            return replace(
                result, outputs={**result.outputs, "talker_ids": inline_ids(f"{key}/talker_ids", [])}
            )
        self._speech.check(prepare)
        text = _as_chat(msgspec.structs.replace(prepare.inputs, output_modalities=["text"]))
        return self._spoken(key, prepare, super().run(node, key, inputs, _plain(prepare, text)))

    def parts(self, ids: Sequence[int], media: Sequence[PlacedMedium]) -> list[PromptPart]:
        return parts_of_films(super().parts(ids, media), media)

    def laid_out(
        self, parts: Sequence[PromptPart], media: Sequence[PlacedMedium]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        sounds = [one for one in apart(media) if one.modality == AUDIO]
        visuals = [one for one in apart(media) if one.modality != AUDIO]
        facts = {
            "parts": msgspec.to_builtins(parts),
            "visuals": [msgspec.to_builtins(visual_of(one)) for one in visuals],
            "sounds": [msgspec.to_builtins(visual_of(one)) for one in sounds],
        }
        arrays = {"pixels": visuals, "audio_features": sounds}
        return facts, {name: pixels_of(of) for name, of in arrays.items() if of}

    def _spoken(self, key: str, prepare: PrepareRequest, result: CpuResult) -> CpuResult:
        """The result with the prompt of the talker."""
        ids = read_ids(result.handle("token_ids"))
        parts = msgspec.convert(result.facts.get("parts", []), list[PromptPart])
        speech, talker_ids = self._speech.of(ids, parts, voice=prepare.params.voice)
        return replace(
            result,
            facts={**result.facts, "speech": msgspec.to_builtins(speech)},
            outputs={**result.outputs, "talker_ids": inline_ids(f"{key}/talker_ids", talker_ids)},
        )


_FRAME_OPTIONS: Final = ("fps", "max_frames")


def _over(own: Params, defaults: Params) -> Params:
    """The parameters, with defaults for a temperature and a share of probability that are not given."""
    return msgspec.structs.replace(
        own,
        temperature=defaults.temperature if own.temperature is None else own.temperature,
        top_p=defaults.top_p if own.top_p is None else own.top_p,
    )


def _plain(prepare: PrepareRequest, inputs: Inputs) -> dict[str, Any]:
    """The arguments of a request for a text, with the thinker's own parameters."""
    options = msgspec.convert(prepare.params.options, OmniOptions)
    thinker = Params(temperature=options.thinker_temperature, top_p=options.thinker_top_p)
    params = _over(prepare.params, thinker)
    found: dict[str, Any] = msgspec.to_builtins(PrepareRequest(inputs=inputs, params=params))
    return found


def _as_chat(inputs: Inputs) -> Inputs:
    """The inputs, whose text is a user's turn: what is to be spoken is an answer."""
    return inputs if inputs.text is None else msgspec.structs.replace(inputs, chat=True)
