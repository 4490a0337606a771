"""The CPU node `prepare` of Qwen3-TTS: a text as an assistant's turn, after codes of a language and a voice.

text of each token    turn (3)   padding ...   begin   text ...   end       padding
code of each token               language and voice    padding ...          begin
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from models.base import CpuResult, TextDecoder
from models.checkpoints.files import CheckpointError, read_json_if_present
from models.options import InvalidOptionError
from models.qwen3_tts.folder import Settings, read_settings
from models.qwen3_tts.graph import VOICES
from models.qwen3_tts.options import Qwen3TtsOptions
from models.sequence_request import PrepareRequest, SamplingParams
from models.spoken_text import NoText, check_speech_params, text_to_speak
from models.text.prepared_prompt import prepare_prompt
from models.text.sampling_defaults import generation_defaults
from models.text.tokenizer import PromptTokenizer, load_tokenizer
from models.voices import known_voice
from shared.errors import BugError, ClientError
from shared.events import Params
from shared.tensors import Handle

PUBLISHED: Final = Params(temperature=0.9, top_k=50, repetition_penalty=1.05)
"""The defaults of the published package, where `generation_config.json` says nothing else."""
FEWEST_FRAMES: Final = 2
"""Speech does not end before."""
_BEFORE, _AFTER = 3, 5
"""The tokens of a turn before and after its text."""
_WITHOUT_INSTRUCTIONS: Final = "0b6"
_AUTO: Final = "auto"


class _Inner(msgspec.Struct, frozen=True):
    """The settings of `generation_config.json` for the codes of a frame after the first."""

    subtalker_dosample: bool = True
    subtalker_temperature: float = 0.9
    subtalker_top_k: int = 50
    subtalker_top_p: float = 1.0


def load(checkpoint: Path, *, max_seq_len: int) -> "Qwen3TtsProcessing":
    """Load the tokenizer and the settings of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
        UnsupportedArchitectureError: the model has no preset voices, or another codec.
    """
    settings = read_settings(checkpoint)
    tokenizer, _ = load_tokenizer(checkpoint)
    vocab_size = settings.talker_config.text_vocab_size
    prompts = PromptTokenizer(tokenizer, vocab_size=vocab_size, max_seq_len=max_seq_len)
    path = checkpoint / "generation_config.json"
    try:
        inner = msgspec.convert(read_json_if_present(path), _Inner)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {error}") from error
    own = generation_defaults(checkpoint)
    given = {name: getattr(own, name) for name in own.__struct_fields__ if getattr(own, name) is not None}
    return Qwen3TtsProcessing(prompts, settings, msgspec.structs.replace(PUBLISHED, **given), inner)


class Qwen3TtsProcessing:
    """The CPU node of one checkpoint (`models.base.Processing`). Re-entrant.

    Attributes:
        eos_ids: the code that ends speech.
    """

    tool_calls = ""

    def __init__(
        self, tokenizer: PromptTokenizer, settings: Settings, defaults: Params, inner: _Inner
    ) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._codes = settings.talker_config
        self._defaults = defaults
        self._inner = inner
        self.eos_ids = (self._codes.codec_eos_token_id,)

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        if node != "prepare":
            raise BugError(f"qwen3_tts has no CPU node {node!r}; it has 'prepare'")
        prepare = PrepareRequest.of(args)
        params, text = prepare.params, text_to_speak(prepare.inputs)
        check_speech_params(params)
        options = msgspec.convert(params.options, Qwen3TtsOptions)
        codes = self._prefix(self._speaker(params.voice, options.speaker), options.language)
        plain, ids = self._prompt(text, options.instructions, len(codes))
        sampled = self._sampled(params, options)
        result = prepare_prompt(key, ids, sampled, tokenizer=self._tokenizer, defaults=self._defaults)
        inner = self._inner_sampling(options, is_greedy=sampled.temperature == 0)
        facts = {
            "codes": codes,
            "plain_tokens": plain,
            "inner_sampling": msgspec.to_builtins(inner),
        }
        return replace(result, facts={**result.facts, **facts})

    def text_decoder(self) -> TextDecoder:
        return NoText()

    def _prompt(self, text: str, instructions: str | None, codes: int) -> tuple[int, list[int]]:
        """The number of tokens before the codes, and the text's token at each place of the prompt."""
        of = self._settings
        turn = self._encode(f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n")
        begin = turn[:_BEFORE]
        if instructions:
            if of.tts_model_size == _WITHOUT_INSTRUCTIONS:
                raise InvalidOptionError(
                    "instructions",
                    "instructions: checkpoints of 0.6B follow none; leave them out, or use one of 1.7B",
                )
            begin = self._encode(f"<|im_start|>user\n{instructions}<|im_end|>\n") + begin
        marks = [of.tts_pad_token_id] * (codes - 1) + [of.tts_bos_token_id]
        spoken = [*turn[_BEFORE:-_AFTER], of.tts_eos_token_id, of.tts_pad_token_id]
        return len(begin), [*begin, *marks, *spoken]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, what="the text")

    def _speaker(self, voice: str | None, speaker: str | None) -> str:
        """The name of the voice in the checkpoint. Names differ in case between files and servers."""
        known = self._codes.spk_id
        asked = voice if voice is not None else speaker
        if asked is None:
            return known_voice(VOICES[0], known) or next(iter(known))
        found = known_voice(asked, known)
        if found is None:
            raise ClientError(
                f"voice: expected one of {', '.join(known)}; found {asked!r}", code="invalid_value"
            )
        return found

    def _prefix(self, speaker: str, language: str) -> list[int]:
        """The codes of a language and a voice, between marks.

        Raises:
            InvalidOptionError: the language is unknown.
        """
        of, wanted = self._codes, language.lower()
        if wanted != _AUTO and wanted not in of.codec_language_id:
            listed = ", ".join([_AUTO, *sorted(of.codec_language_id)])
            raise InvalidOptionError("language", f"language: expected one of {listed}; found {language!r}")
        dialect = of.spk_is_dialect.get(speaker)
        if wanted in (_AUTO, "chinese") and isinstance(dialect, str):
            wanted = dialect
        if wanted == _AUTO:
            thought = [of.codec_nothink_id, of.codec_think_bos_id]
        else:
            thought = [of.codec_think_id, of.codec_think_bos_id, of.codec_language_id[wanted]]
        return [*thought, of.codec_think_eos_id, of.spk_id[speaker], of.codec_pad_id]

    def _sampled(self, params: Params, options: Qwen3TtsOptions) -> Params:
        """The parameters of the first codes, with those that are given as options."""
        temperature = params.temperature
        if temperature is None:
            temperature = options.talker_temperature
        if options.do_sample is False:
            temperature = 0.0
        fewest = max(FEWEST_FRAMES, params.min_tokens or 0)
        if params.max_tokens is not None:
            fewest = min(fewest, params.max_tokens)
        return msgspec.structs.replace(params, temperature=temperature, min_tokens=fewest)

    def _inner_sampling(self, options: Qwen3TtsOptions, *, is_greedy: bool) -> SamplingParams:
        """The sampling of the other codes: the request's over the checkpoint's, greedy with the first."""
        of, drawn = self._inner, options.subtalker_dosample
        if drawn is None:
            drawn = of.subtalker_dosample and not (is_greedy and options.subtalker_temperature is None)
        if not drawn:
            return SamplingParams(temperature=0.0)
        temperature, top_k, top_p = (
            options.subtalker_temperature,
            options.subtalker_top_k,
            options.subtalker_top_p,
        )
        return SamplingParams(
            temperature=of.subtalker_temperature if temperature is None else temperature,
            top_k=of.subtalker_top_k if top_k is None else top_k,
            top_p=of.subtalker_top_p if top_p is None else top_p,
        )
