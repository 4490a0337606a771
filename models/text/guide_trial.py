"""Trial of a client's grammar in a separate process with limited time, memory and stack.

    python -I guide_trial.py < {"grammar": ..., "marks": [...]}      prints the error, if there is one

A few lines of grammar suffice to compile for hours, or to recurse until the process dies. So a grammar is
compiled here first, with a smaller stack than a worker's threads, little memory and `CPU_S` of processor
time, and followed for some bytes; one that passes is safe in a worker. `models.text.guides` runs this file by
its path, so it imports nothing of the project.
"""

import json
import resource
import sys
import threading
from collections.abc import Sequence
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

CPU_S: Final = 3
"""The most processor time of a grammar, in seconds."""
_STACK_BYTES: Final = 2 << 20
_MEMORY_BYTES: Final = 2 << 30
_STEPS: Final = 64


class Vocabulary:
    """A tokenizer for llguidance: the bytes of each token, and the special tokens.

    One token is appended, the end of an answer, independent of the model's end-of-sequence tokens.
    """

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], marks: Sequence[int]) -> None:
        self.eos_token_id = len(tokens)
        self.tokens = [*tokens, b"<|the end|>"]
        self.special_token_ids = [*marks, self.eos_token_id]

    def __call__(self, _text: bytes) -> list[int]:
        """Never called: the grammars set `no_forcing`."""
        raise NotImplementedError

    def compiled(self) -> LLTokenizer:
        """Build llguidance's tokenizer; the tokens are released here."""
        wrapper = TokenizerWrapper(self)
        tokenizer = LLTokenizer(wrapper)
        wrapper.tokens = self.tokens = []
        return tokenizer


def limits() -> LLParserLimits:
    """The limits of a grammar, in the trial and in workers; others have llguidance's defaults.

    All answers of a step wait for its masks. A mask takes 15 ms at most. The items of a parser row are
    compared with one another, for each reading of the text so far: ambiguous grammars take 20 ms for a row of
    1,000 items. Usual rows have about a hundred; schemas need four per optional property. A lexer state takes
    about 500 bytes, and a worker keeps many grammars.
    """
    return LLParserLimits(
        max_lexer_states=50_000, max_items_in_row=1_000, step_max_items=4_000, verbose_errors=False
    )


def error_of(grammar: str, marks: Sequence[str]) -> str:
    """The error of a grammar, which may name these special tokens; empty if there is none."""
    tokens = [bytes([byte]) for byte in range(256)] + [mark.encode() for mark in marks]
    tokenizer = Vocabulary(tokens, range(256, len(tokens))).compiled()
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    for step in range(_STEPS):
        if matcher.is_error():
            break
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(len(tokens)) if mask[token >> 3] >> (token & 7) & 1]
        if not allowed or matcher.is_error():
            break
        matcher.consume_token(allowed[step * 31 % len(allowed)])
    return matcher.get_error()


def main() -> None:
    """Try the grammar from standard input; print its error."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    task = json.load(sys.stdin.buffer)
    threading.stack_size(_STACK_BYTES)
    trial = threading.Thread(target=lambda: sys.stdout.write(error_of(task["grammar"], task["marks"])))
    trial.start()
    trial.join()


if __name__ == "__main__":
    main()
