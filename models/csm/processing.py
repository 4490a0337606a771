"""The CPU node `prepare` of CSM: a text as the model was trained on it, `[speaker]text` between two marks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from models.base import CpuResult, TextDecoder
from models.checkpoints.files import CheckpointError, read_json
from models.csm.graph import VOICES
from models.sequence_request import PrepareRequest
from models.spoken_text import NoText, check_speech_params, text_to_speak, voice_named
from models.text.prepared_prompt import prepare_prompt
from models.text.tokenizer import PromptTokenizer, load_tokenizer
from shared.errors import BugError
from shared.events import Params
from shared.tensors import Handle

PUBLISHED: Final = Params(temperature=0.9, top_k=50)
"""The defaults of the published generator."""


def load(checkpoint: Path, *, max_seq_len: int) -> "CsmProcessing":
    """Load the tokenizer of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed, or the configuration is no CSM's.
    """
    config = read_json(checkpoint / "config.json")
    codes, text_tokens = config.get("vocab_size", 2051), config.get("text_vocab_size", 128_256)
    if not isinstance(codes, int) or not isinstance(text_tokens, int):
        raise CheckpointError(
            f"{checkpoint / 'config.json'}: expected numbers as vocab_size and text_vocab_size, found "
            f"{codes!r} and {text_tokens!r}"
        )
    tokenizer, _ = load_tokenizer(checkpoint)
    if tokenizer.get_vocab_size() > text_tokens:
        raise CheckpointError(
            f"{checkpoint / 'config.json'}: expected a text_vocab_size of {tokenizer.get_vocab_size()} or "
            f"more, found {text_tokens}"
        )
    prompts = PromptTokenizer(tokenizer, vocab_size=text_tokens, max_seq_len=max_seq_len)
    return CsmProcessing(prompts, end=codes)


class CsmProcessing:
    """The CPU node of one checkpoint (`models.base.Processing`). Re-entrant.

    Attributes:
        eos_ids: the token that the KV node adds to its codes as the end of speech.
    """

    tool_calls = ""

    def __init__(self, tokenizer: PromptTokenizer, *, end: int) -> None:
        self._tokenizer = tokenizer
        self.eos_ids = (end,)

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        if node != "prepare":
            raise BugError(f"csm has no CPU node {node!r}; it has 'prepare'")
        prepare = PrepareRequest.of(args)
        params, text = prepare.params, text_to_speak(prepare.inputs)
        check_speech_params(params)
        prompt = f"[{voice_named(params.voice, VOICES)}]{text}"
        ids = self._tokenizer.encode(prompt, add_special_tokens=True, what="the text")
        return prepare_prompt(key, ids, params, tokenizer=self._tokenizer, defaults=PUBLISHED)

    def text_decoder(self) -> TextDecoder:
        return NoText()
