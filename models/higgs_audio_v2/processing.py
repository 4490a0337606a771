"""The CPU node `prepare` of Higgs Audio v2: the checkpoint's chat template around a text and a scene."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from models.base import CpuResult, TextlessProcessing
from models.checkpoints.files import CheckpointError, read_json_if_present
from models.higgs_audio_v2.graph import VOICES, Prepared
from models.higgs_audio_v2.options import HiggsAudioOptions
from models.higgs_audio_v2.settings import HiggsAudioSettings
from models.sequence_request import PrepareRequest
from models.spoken_text import (
    check_sampled_by_draws_only,
    check_speech_params,
    text_to_speak,
    voice_named,
)
from models.text.chat_template import ChatTemplate, find_template
from models.text.sampling_defaults import generation_defaults
from models.text.tokenizer import PromptTokenizer, load_tokenizer
from shared.errors import BugError, ClientError
from shared.events import Params
from shared.tensors import Handle, inline_ids

PUBLISHED: Final = Params(temperature=0.3, top_p=0.95, top_k=50)
"""What the publisher's examples ask for, where `generation_config.json` says nothing else."""

_SAMPLING: Final = ("temperature", "top_p", "top_k")


def load(checkpoint: Path, *, max_seq_len: int) -> "HiggsAudioProcessing":
    """Load the tokenizer, the chat template and the settings of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    return HiggsAudioProcessing(checkpoint, max_seq_len=max_seq_len)


class HiggsAudioProcessing(TextlessProcessing):
    """The CPU node of one checkpoint (`models.base.Processing`). Re-entrant."""

    def __init__(self, checkpoint: Path, *, max_seq_len: int) -> None:
        self._settings = settings = HiggsAudioSettings.read(checkpoint)
        own = generation_defaults(checkpoint)
        given = {name: getattr(own, name) for name in _SAMPLING if getattr(own, name) is not None}
        self._defaults = msgspec.structs.replace(PUBLISHED, **given)
        tokenizer, names = load_tokenizer(checkpoint)
        found = find_template(checkpoint, read_json_if_present(checkpoint / "tokenizer_config.json"))
        if found is None:
            raise CheckpointError(
                f"{checkpoint}: expected a chat template; use the files that were published with the weights"
            )
        self._template = ChatTemplate(found[0], names, origin=found[1])
        self._tokenizer = PromptTokenizer(tokenizer, vocab_size=settings.vocab_size, max_seq_len=max_seq_len)
        last = self._prompt("text", HiggsAudioOptions())[-1]
        if last != settings.audio_bos_token_id:
            raise CheckpointError(
                f"{found[1]}: expected the chat template to end with the token audio_bos_token_id "
                f"({settings.audio_bos_token_id}), found {last}"
            )

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        if node != "prepare":
            raise BugError(f"higgs_audio_v2 has no CPU node {node!r}; it has 'prepare'")
        prepare = PrepareRequest.of(args)
        params, text = prepare.params, text_to_speak(prepare.inputs)
        check_speech_params(params)
        check_sampled_by_draws_only(params)
        voice_named(params.voice, VOICES)
        ids = self._prompt(text, msgspec.convert(params.options, HiggsAudioOptions))
        facts = msgspec.to_builtins(self._prepared(params, len(ids)))
        return CpuResult(facts=facts, outputs={"token_ids": inline_ids(f"{key}/token_ids", ids)})

    def _prompt(self, text: str, options: HiggsAudioOptions) -> list[int]:
        """The tokens of a turn that asks for the text; the last one begins its sound.

        Raises:
            ClientError: the request spells tokens of sound, or is too long.
        """
        messages = [{"role": "system", "content": options.instructions}]
        if options.scene.strip():
            messages.append({"role": "scene", "content": options.scene})
        messages.append({"role": "user", "content": text})
        prompt, settings = self._template.render(messages), self._settings
        ids = self._tokenizer.encode(prompt, add_special_tokens=False, what="the text")
        sound = {settings.audio_bos_token_id, settings.audio_token_id, settings.audio_delay_token_id}
        if sound.intersection(ids[:-1]):
            raise ClientError(
                "the text, the scene or the instructions spell a token of sound: leave it out",
                code="invalid_value",
            )
        return ids

    def _prepared(self, params: Params, tokens: int) -> Prepared:
        shortest = self._settings.num_codebooks + 1
        if params.max_tokens is not None and params.max_tokens < shortest:
            raise ClientError(
                f"max_tokens: expected {shortest} or more, found {params.max_tokens}: the codes of a frame "
                f"are delayed by up to {shortest - 2} steps",
                code="invalid_value",
            )

        temperature, top_p, top_k = (
            getattr(self._defaults if getattr(params, name) is None else params, name) for name in _SAMPLING
        )
        return Prepared(
            prompt_tokens=tokens,
            shortest=shortest,
            temperature=temperature,
            top_p=top_p,
            top_k=max(0, top_k),
        )
