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
from models.spoken_text import NoText, check_speech_params, text_to_speak, voice_named
from models.text.prepared_prompt import prepare_prompt
from models.text.tokenizer import PromptTokenizer, load_tokenizer, vocab_size_of
from shared.errors import BugError
from shared.events import Params
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
        params, text = prepare.params, text_to_speak(prepare.inputs)
        check_speech_params(params)
        prompt = f"{voice_named(params.voice, self._voices)}: {text}"
        ids = [START, *self._tokenizer.encode(prompt, add_special_tokens=True, what="the text"), *END]
        return prepare_prompt(key, ids, params, tokenizer=self._tokenizer, defaults=PUBLISHED)

    def text_decoder(self) -> TextDecoder:
        return NoText()
