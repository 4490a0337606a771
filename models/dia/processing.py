"""The CPU node `prepare` of Dia: the bytes of a text, in which `[S1]` and `[S2]` name the speaker."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from models.base import CpuResult, TextlessProcessing
from models.dia.graph import VOICES, Prepared
from models.dia.options import DiaOptions
from models.dia.settings import DiaSettings
from models.sequence_request import PrepareRequest
from models.spoken_text import (
    check_sampled_by_draws_only,
    check_speech_params,
    text_to_speak,
    voice_named,
)
from shared.errors import BugError, ClientError
from shared.events import Params
from shared.tensors import Handle, inline_ids

_MARKS: Final = {"<pad>": 0, "[S1]": 1, "[S2]": 2}
"""The published tokenizer's texts that are one token; all others are bytes."""
_SPLIT: Final = re.compile("(" + "|".join(map(re.escape, _MARKS)) + ")")


def token_ids(text: str) -> list[int]:
    """The tokens of a text, as transformers' `DiaTokenizer` has them."""
    return [
        token
        for part in _SPLIT.split(text)
        for token in ([_MARKS[part]] if part in _MARKS else part.encode(errors="replace"))
    ]


def load(checkpoint: Path, *, max_seq_len: int) -> "DiaProcessing":
    """Load the settings of a checkpoint; there is no tokenizer to be read.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    return DiaProcessing(DiaSettings.read(checkpoint))


class DiaProcessing(TextlessProcessing):
    """The CPU node of one checkpoint (`models.base.Processing`). Re-entrant."""

    def __init__(self, settings: DiaSettings) -> None:
        self._settings = settings

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        if node != "prepare":
            raise BugError(f"dia has no CPU node {node!r}; it has 'prepare'")
        prepare = PrepareRequest.of(args)
        params, text = prepare.params, text_to_speak(prepare.inputs)
        check_speech_params(params)
        check_sampled_by_draws_only(params)
        voice = voice_named(params.voice, VOICES)
        ids = token_ids(text if text.startswith(tuple(_MARKS)) else f"[{voice}] {text}")
        if len(ids) > self._settings.text:
            raise ClientError(
                f"the text: expected at most {self._settings.text} bytes, found {len(ids)}; send it in parts",
                code="context_length_exceeded",
            )
        facts = msgspec.to_builtins(self._prepared(params, len(ids)))
        return CpuResult(facts=facts, outputs={"token_ids": inline_ids(f"{key}/token_ids", ids)})

    def _prepared(self, params: Params, tokens: int) -> Prepared:
        settings, options = self._settings, msgspec.convert(params.options, DiaOptions)
        temperature = settings.temperature if params.temperature is None else params.temperature
        if 0 < temperature < 1:
            raise ClientError(
                f"temperature: expected 0, which is greedy, or 1 and more, found {temperature}: the model "
                "was not made for less",
                code="invalid_value",
            )
        shortest = settings.longest_delay + 2
        if params.max_tokens is not None and params.max_tokens < shortest:
            raise ClientError(
                f"max_tokens: expected {shortest} or more, found {params.max_tokens}: the codes of a frame "
                f"are delayed by up to {settings.longest_delay} steps",
                code="invalid_value",
            )
        scale = options.guidance_scale
        return Prepared(
            prompt_tokens=tokens,
            most=settings.max_length + settings.longest_delay - 1,
            shortest=shortest,
            temperature=temperature,
            top_p=settings.top_p if params.top_p is None else params.top_p,
            top_k=max(0, settings.top_k if params.top_k is None else params.top_k),
            guidance_scale=settings.guidance_scale if scale is None else scale,
        )
