"""The CPU node `prepare` of Orpheus.

It turns a text into the prompt that the model was trained on, `voice: text` between special tokens, and the
parameters into effective ones: the request's over the published defaults. Messages are refused, because the
model has no chat template, and so are parameters of text output, because there is none.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from models.base import CpuResult, TextDecoder
from models.checkpoints.files import CheckpointError
from models.orpheus.frames import END_AUDIO
from models.orpheus.graph import VOICES
from models.sequence_request import PrepareRequest
from models.text.prepared_prompt import prepare_prompt
from models.text.tokenizer import PromptTokenizer, load_tokenizer, vocab_size_of
from models.voices import known_voice
from shared.errors import BugError, ClientError
from shared.events import Inputs, Params
from shared.tensors import Handle

START: Final = 128_259
"""The special token before a text: start of human."""
END: Final = (128_009, 128_260, 128_261, 128_257)
"""The special tokens after a text: end of text, end of human, start of AI, start of speech."""
STOP: Final = 128_258
"""End of speech: the only token that ends an answer."""

PUBLISHED: Final = Params(temperature=0.6, top_p=0.8, repetition_penalty=1.3)
"""The defaults of the package `orpheus-speech`; `generation_config.json` has those of the base model."""

_MARK: Final = "<custom_token_{}>"
_MARKS_FROM: Final = 128_256


def load(checkpoint: Path, *, max_seq_len: int, voices: Sequence[str] = VOICES) -> "OrpheusProcessing":
    """Load the tokenizer of a checkpoint. Of `voices`, the first is the default.

    Raises:
        CheckpointError: a file is missing or malformed, or the special tokens have other ids than Orpheus'.
    """
    tokenizer, _ = load_tokenizer(checkpoint)
    for token_id in (*range(_MARKS_FROM, START + 3), END_AUDIO - 1):
        mark = _MARK.format(token_id - _MARKS_FROM)
        if tokenizer.token_to_id(mark) != token_id:
            raise CheckpointError(
                f"{checkpoint / 'tokenizer.json'} is not Orpheus': expected {mark} as token {token_id}, "
                f"found {tokenizer.token_to_id(mark)}"
            )
    vocab_size = vocab_size_of(checkpoint, tokenizer)
    if vocab_size < END_AUDIO:
        raise CheckpointError(
            f"{checkpoint / 'config.json'}: expected a vocab_size of {END_AUDIO} or more, found {vocab_size}"
        )
    prompts = PromptTokenizer(tokenizer, vocab_size=vocab_size, max_seq_len=max_seq_len)
    return OrpheusProcessing(prompts, voices)


class OrpheusProcessing:
    """The CPU nodes of one checkpoint (`models.base.Processing`). Re-entrant."""

    eos_ids = (STOP,)
    tool_calls = ""

    def __init__(self, tokenizer: PromptTokenizer, voices: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._voices = tuple(voices)

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        if node != "prepare":
            raise BugError(f"orpheus has no CPU node {node!r}; it has 'prepare'")
        prepare = PrepareRequest.of(args)
        params, text = prepare.params, _text(prepare.inputs)
        _check_params(params)
        prompt = f"{self._voice(params.voice)}: {text}"
        ids = [START, *self._tokenizer.encode(prompt, add_special_tokens=True, what="the text"), *END]
        return prepare_prompt(key, ids, params, tokenizer=self._tokenizer, defaults=PUBLISHED)

    def text_decoder(self) -> TextDecoder:
        return _NoText()

    def _voice(self, name: str | None) -> str:
        """The name of the voice, as it is written in the prompt."""
        voice = self._voices[0] if name is None else known_voice(name, self._voices)
        if voice is None:
            raise ClientError(
                f"voice: expected one of {', '.join(self._voices)}; found {name!r}", code="invalid_value"
            )
        return voice


class _NoText:
    """Detokenizer of audio tokens, which have no text."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def bytes_of(self, token_id: int) -> bytes:
        return b""


def _text(request: Inputs) -> str:
    """The text to speak."""
    if request.files or set(request.input_modalities) - {"text"}:
        found = [medium.modality for medium in request.files] or request.input_modalities
        raise ClientError(f"this model reads text only; found {found}", code="unsupported_modality")
    if request.output_modalities != ["audio"]:
        raise ClientError(
            f"this model speaks: expected output_modalities ['audio'], found {request.output_modalities}",
            code="unsupported_modality",
        )
    if request.text is None:
        given = "messages" if request.messages is not None else "token_ids"
        raise ClientError(
            f"this model speaks one text and takes no {given}: send the text itself "
            "(POST /v1/audio/speech, or /generate with text)",
            code="not_supported",
        )
    if not request.text.strip():
        raise ClientError("the text is empty: expected at least one word")
    return request.text


def _check_params(params: Params) -> None:
    """Refuse parameters of text output."""
    given = {
        "stop": params.stop,
        "logprobs": params.logprobs is not None,
        "echo": params.echo,
        "guide": params.guide is not None,
    }
    for name, value in given.items():
        if value:
            raise ClientError(
                f"{name} is a parameter of text output, and this model outputs audio: leave it out",
                code="not_supported",
            )
