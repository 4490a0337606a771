"""Tries a grammar out, in a process of its own: it may be made to take for ever, or to overflow the stack.

    python -I guide_trial.py < {"grammar": ..., "marks": [...]}      prints what is wrong with it, if anything

A grammar is the client's, and a few lines suffice for one whose compilation takes hours, or recurses until
the process dies. So it is compiled here first, with less stack than a worker's threads have, little memory
and `CPU_S` of processor time, and followed for some bytes: what survives this does a worker no harm. Imports
nothing of ours: `models.text.guides` runs it by its path.
"""

import json
import resource
import sys
import threading
from collections.abc import Sequence
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

CPU_S: Final = 3
"""How long a grammar may take."""
_STACK_BYTES: Final = 2 << 20
_MEMORY_BYTES: Final = 2 << 30
_STEPS: Final = 64


class Vocabulary:
    """What llguidance is told of a tokenizer: the bytes of each token, and which are marks and no text.

    The last token is the end, whatever ends an answer of the model.
    """

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], marks: Sequence[int]) -> None:
        self.eos_token_id = len(tokens)
        self.tokens = [*tokens, b"<|the end|>"]
        self.special_token_ids = [*marks, self.eos_token_id]

    def __call__(self, _text: bytes) -> list[int]:
        """Never called for a mask: grammars say that no token is forced."""
        raise NotImplementedError

    def compiled(self) -> LLTokenizer:
        """As llguidance has it; the tokens are not kept here."""
        wrapper = TokenizerWrapper(self)
        tokenizer = LLTokenizer(wrapper)
        wrapper.tokens = self.tokens = []
        return tokenizer


def limits() -> LLParserLimits:
    """What a grammar may cost, here and in the worker; what is not said is llguidance's own choice.

    All answers of a step wait for its masks. A mask's fuel is 15 ms at most. Each item of a row is compared
    with the others of it, for each way to read what came before: it is the row that counts, and grammars of
    many meanings take 20 ms for one of 1,000 items. Usual ones have some hundred, schemas four for each
    optional property. A lexer's state is some 500 bytes, and a worker keeps many grammars.
    """
    return LLParserLimits(
        max_lexer_states=50_000, max_items_in_row=1_000, step_max_items=4_000, verbose_errors=False
    )


def error_of(grammar: str, marks: Sequence[str]) -> str:
    """What is wrong with a grammar that may name these marks; empty where nothing is."""
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
    """Try the grammar on the standard input."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asked = json.load(sys.stdin.buffer)
    threading.stack_size(_STACK_BYTES)
    trial = threading.Thread(target=lambda: sys.stdout.write(error_of(asked["grammar"], asked["marks"])))
    trial.start()
    trial.join()


if __name__ == "__main__":
    main()
