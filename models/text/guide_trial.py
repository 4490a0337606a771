"""Trials of clients' grammars in separate processes with limited time, memory and stack.

    python -I guide_trial.py        a JSON list of special tokens on the first line of standard input,
                                    then a grammar per line, as a JSON string; a `Verdict` line for each

A few lines of grammar suffice to compile for hours, or to recurse until the process dies. So a grammar is
compiled here first, with a smaller stack than a worker's threads, little memory and `CPU_S` of processor
time, and followed for some bytes; one that passes is safe in a worker. This process stays, because its
start takes 0.1 s; each trial runs in a fork of it, which the operating system ends at its limits.

`models.text.trial_process` runs this file by its path, so it imports nothing of the project.
"""

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Final, NoReturn, TypedDict

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

CPU_S: Final = 1.0
"""The most processor time of a grammar, in seconds: some hundred times what usual ones take."""
_NICE: Final = 10
"""The niceness of trials: where processors are busy, the engine has precedence."""
_STACK_BYTES: Final = 2 << 20
_MEMORY_BYTES: Final = 2 << 30
_STEPS: Final = 64
_MAX_ERROR_BYTES: Final = 1 << 15
"""The most bytes of an error; a pipe takes as many at once."""


class Verdict(TypedDict):
    """The result of one trial.

    Attributes:
        error: the error of the grammar; empty if there is none, or if the process was ended.
        ended_by: the signal that ended the process; 0 if it ended by itself.
        cpu_s: the processor time that the trial took.
    """

    error: str
    ended_by: int
    cpu_s: float


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


def tokenizer_of(marks: Sequence[str]) -> tuple[LLTokenizer, int]:
    """A tokenizer of all bytes and these special tokens, and its number of tokens."""
    tokens = [bytes([byte]) for byte in range(256)] + [mark.encode() for mark in marks]
    return Vocabulary(tokens, range(256, len(tokens))).compiled(), len(tokens)


def error_of(grammar: str, tokenizer: LLTokenizer, vocab_size: int) -> str:
    """The error of a grammar; empty if there is none."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    for step in range(_STEPS):
        if matcher.is_error():
            break
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(vocab_size) if mask[token >> 3] >> (token & 7) & 1]
        if not allowed or matcher.is_error():
            break
        matcher.consume_token(allowed[step * 31 % len(allowed)])
    return matcher.get_error()


def main() -> None:
    """Try each grammar from standard input; print its verdict."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which closes standard input
    os.nice(_NICE)
    tokenizer, vocab_size = tokenizer_of(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        verdict = _verdict_of(json.loads(line), tokenizer, vocab_size)
        sys.stdout.write(f"{json.dumps(verdict)}\n")
        sys.stdout.flush()


def _verdict_of(grammar: str, tokenizer: LLTokenizer, vocab_size: int) -> Verdict:
    """Try a grammar in a fork of this process."""
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        os.close(source)
        _try(grammar, tokenizer, vocab_size, sink)
    os.close(sink)
    with os.fdopen(source, "rb") as written:
        error = written.read()
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    ended_by = -code if code <= 0 else int(signal.SIGABRT)  # a positive code is a Python error: no memory
    return Verdict(
        error=error.decode(errors="replace"), ended_by=ended_by, cpu_s=usage.ru_utime + usage.ru_stime
    )


def _try(grammar: str, tokenizer: LLTokenizer, vocab_size: int, sink: int) -> NoReturn:
    """Write the error of the grammar to `sink`, and end this process."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # at its end SIGPROF ends the process
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    errors: list[str] = []
    trial = threading.Thread(target=lambda: errors.append(error_of(grammar, tokenizer, vocab_size)))
    trial.start()
    trial.join()
    os.write(sink, "".join(errors).encode(errors="replace")[:_MAX_ERROR_BYTES])
    os._exit(0 if errors else 1)


if __name__ == "__main__":
    main()
