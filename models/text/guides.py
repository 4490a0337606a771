"""Guides: what an answer has to be, as a mask over the vocabulary for its next token. The door to llguidance.

    Guide ── as a grammar ── tried out in a process of its own ── compiled, and kept ── followed, per answer

A `Matcher` is a fold over the tokens of an answer, and over nothing else: made again and given the same
tokens, in whatever pieces, it allows the same. It works on the bytes that tokens have in a text, so a text
is spelled by whichever tokens the model likes; nothing is forced that the model did not choose.

An answer's end is no token here: it is said of each place whether the answer may end there.
"""

import hashlib
import json
import re
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from models.text import guide_trial
from models.text.detokenizer import TextDecoders
from models.text.guide_errors import explanation_of
from shared.errors import BugError, ClientError, WorkerError
from shared.events import Guide

_KEPT: Final = 32
"""So many guides stay compiled; one takes 25 MB at most, most take some KB."""
_TRIAL_S: Final = 60.0
"""A trial that has not ended by then was not given the processor: that is no fault of the guide's."""
_WHITESPACE: Final = r"[ ]|\n[ ]{0,40}|\n\t{0,20}"
"""Between the tokens of JSON: a space, or a new line and what indents it. Without a bound a model may write
nothing else until its answer is full."""
_JSON_OPTIONS: Final = {
    "whitespace_flexible": True,
    "whitespace_pattern": _WHITESPACE,
    # No \uXXXX: a pattern, or the names of other properties, would not know the characters that it spells.
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}
_SHARED: Final = "lexer error"
"""So begins what is said where a limit is reached that all who follow a guide share."""
_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keys of a schema whose values are schemas by name."""
_LITERAL: Final = frozenset({"const", "enum", "default", "examples"})
"""Those whose values are no schemas, whatever they look like."""
_PLACE: Final = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
"""Where in a grammar an error is: line and column."""


class InvalidGuideError(ClientError):
    """A guide that is no valid one, asks for what cannot be kept, or is too much to follow.

    Attributes:
        what: what is wrong, wherever the guide came from.
    """

    code = "invalid_guide"

    def __init__(self, what: str, *, kind: str = "", where: str = "") -> None:
        super().__init__(": ".join(part for part in (kind, where, what) if part))
        self.what: Final = what


class Allowed(NamedTuple):
    """What may come next.

    Attributes:
        bits: of each token, lowest bit first: (ceil(vocabulary / 8),) uint8. The matcher's own: it is
            written again for the next token.
        may_end: whether the answer may end here.
    """

    bits: npt.NDArray[np.uint8]
    may_end: bool


class Guides:
    """Guides over one vocabulary. Re-entrant.

    Args:
        tokens: the bytes each token has in a text; of a mark, which has none there, its name.
        marks: the tokens that are marks.
        drops_space: a text begins behind the space that its first token has (Llama 2's tokenizer).
    """

    def __init__(self, tokens: Sequence[bytes], marks: Sequence[int], *, drops_space: bool) -> None:
        self._marks = frozenset(marks)
        self._mark_names = [tokens[mark].decode(errors="replace") for mark in marks]
        self._vocab_size = len(tokens)
        self._tokenizer = guide_trial.Vocabulary(tokens, list(marks)).compiled()
        self._drops_space = drops_space
        self._kept: OrderedDict[bytes, CompiledGuide] = OrderedDict()
        self._lock = Lock()

    def check(self, guide: Guide) -> None:
        """See that a guide that comes from outside can be followed; from here on it is compiled.

        Raises:
            InvalidGuideError: it cannot, or was found to take for ever.
        """
        found = self._find(guide)
        if found is None:
            self._try(guide)
            self.compiled(guide)
        elif found.condemned:
            raise InvalidGuideError(found.condemned)

    def compiled(self, guide: Guide) -> "CompiledGuide":
        """A guide, ready to be followed. Not for guides that nobody has checked, here or on another worker.

        Raises:
            InvalidGuideError: it is invalid, or no text can be what it asks for.
        """
        found = self._find(guide)
        if found is not None:
            return found
        made = CompiledGuide(
            self._grammar(guide),
            self._compile,
            marks=self._marks,
            vocab_size=self._vocab_size,
            kind=_kind_of(guide),
        )
        made.matcher().push(())
        with self._lock:
            self._kept[_digest(guide)] = made
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made

    def _find(self, guide: Guide) -> "CompiledGuide | None":
        digest = _digest(guide)
        with self._lock:
            found = self._kept.get(digest)
            if found is not None:
                self._kept.move_to_end(digest)
            return found

    def _compile(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=guide_trial.limits())

    def _grammar(self, guide: Guide) -> str:
        """The guide as llguidance reads it."""
        start = 'start: " " @guide' if self._drops_space else "start: @guide"
        whole = {"lark_grammar": f'%llguidance {{"no_forcing": true}}\n{start}'}
        return json.dumps({"grammars": [whole, {"name": "guide", **_part_of(guide)}]})

    def _try(self, guide: Guide) -> None:
        if guide.choice is not None or guide.json_object:
            return  # what is made of these takes no time
        asked = {"grammar": self._grammar(guide), "marks": self._mark_names}
        try:
            trial = subprocess.run(
                [sys.executable, "-I", str(Path(guide_trial.__file__))],
                input=json.dumps(asked).encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_TRIAL_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise WorkerError(f"a guide could not be tried out: {error}") from error
        kind = _kind_of(guide)
        match trial.returncode:
            case 0:
                if trial.stdout:
                    raise _invalid(kind, trial.stdout.decode(errors="replace"))
            case code if code == -signal.SIGXCPU:
                raise _invalid(kind, f"it takes more than {guide_trial.CPU_S} s to compile; make it smaller")
            case code if code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT):
                raise _invalid(kind, "it is nested too deeply, or takes too much memory; make it smaller")
            case code:
                raise WorkerError(f"a guide could not be tried out: its process ended with {code}")


def guides_of(decoders: TextDecoders, vocab_size: int) -> Guides | None:
    """Guides over a model's vocabulary; None if a text is not the concatenation of its tokens' bytes."""
    spelling = decoders.spelling(vocab_size)
    if spelling is None:
        return None
    marks = sorted(id for id in decoders.marks if id < vocab_size)
    return Guides(spelling.tokens, marks, drops_space=spelling.drops_space)


class CompiledGuide:
    """A guide that answers can follow. Its matchers share what they learn of it.

    Attributes:
        marks: tokens that are no text.
        vocab_size: how many tokens there are.
        condemned: nobody is to follow it any more, and why; empty of those that can be followed.
    """

    def __init__(
        self,
        grammar: str,
        compile_: Callable[[str], LLMatcher],
        *,
        marks: frozenset[int],
        vocab_size: int,
        kind: str,
    ) -> None:
        self.marks: Final = marks
        self.vocab_size: Final = vocab_size
        self.condemned = ""
        self._grammar = grammar
        self._compile = compile_
        self._kind = kind
        self._first: LLMatcher | None = None
        self._lock = Lock()

    def matcher(self) -> "Matcher":
        """One that has followed nothing yet."""
        return Matcher(self)

    def begin(self) -> LLMatcher:
        """The library's own matcher, which shares with others of this guide.

        Raises:
            InvalidGuideError: the guide is invalid.
        """
        with self._lock:
            if self._first is None:
                self._first = self.begin_alone()
            return self._first.deep_copy()

    def begin_alone(self) -> LLMatcher:
        """The library's own matcher, which shares with nobody."""
        made = self._compile(self._grammar)
        if made.is_error():
            raise self.invalid(made)
        return made

    def leave(self) -> None:
        """What was shared is used up: from here on others share something new."""
        with self._lock:
            self._first = None

    def condemn(self) -> None:
        """A matcher of it is taking for ever: whoever shares with that one would wait for it."""
        self.condemned = InvalidGuideError(
            "expected a guide whose next token is known in no time, found one that takes for ever to say; "
            "give it fewer ways to read one text",
            kind=self._kind,
        ).message

    def invalid(self, matcher: LLMatcher) -> InvalidGuideError:
        """What is to be said of a matcher that failed."""
        return _invalid(self._kind, matcher.get_error())


class Matcher:
    """One answer that follows a guide. For one thread at a time.

    Attributes:
        tokens: how many tokens it has followed.
    """

    def __init__(self, compiled: CompiledGuide) -> None:
        self._compiled = compiled
        self._inner: LLMatcher | None = None
        self._ids: list[int] = []
        # One bit more than there are tokens: the library's own end.
        self._words = np.zeros(compiled.vocab_size // 32 + 1, np.uint32)
        self._bits = self._words.view(np.uint8)

    @property
    def tokens(self) -> int:
        return len(self._ids)

    def condemn(self) -> None:
        """It is taking for ever: its guide is followed by nobody from here on."""
        self._compiled.condemn()

    def push(self, token_ids: Sequence[int]) -> Allowed:
        """Follow these tokens, and say what may come behind them.

        Raises:
            InvalidGuideError: it is too much to follow; or nothing may follow.
            BugError: a token is not allowed.
        """
        self._ids += token_ids
        if self._inner is None:
            self._inner = self._compiled.begin()
        if not self._follow(self._inner, token_ids):
            if not self._inner.get_error().startswith(_SHARED):
                raise self._compiled.invalid(self._inner)
            # How much the library may learn of a grammar is limited, and others have learnt of this one, too.
            # Whether it can be followed here shall not depend on them.
            self._compiled.leave()
            self._inner = self._compiled.begin_alone()
            if not self._follow(self._inner, self._ids):
                raise self._compiled.invalid(self._inner)
        end = self._compiled.vocab_size
        may_end = bool(self._bits[end >> 3] >> (end & 7) & 1)
        self._bits[end >> 3] &= ~np.uint8(1 << (end & 7))
        return Allowed(self._bits[: (end + 7) // 8], may_end)

    def _follow(self, inner: LLMatcher, token_ids: Sequence[int]) -> bool:
        """Follow tokens and fill in the mask behind them; False where a limit was reached.

        One by one: the library keeps the interpreter while it follows, and an answer may have many that take
        long.
        """
        for token_id in token_ids:
            self._check_condemned()
            if not inner.try_consume_tokens([token_id]):
                if inner.is_error():
                    return False
                raise BugError(f"a guide does not allow the token {token_id} that was chosen")
        self._check_condemned()
        inner.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        return not inner.is_error()

    def _check_condemned(self) -> None:
        if self._compiled.condemned:
            raise InvalidGuideError(self._compiled.condemned)


def _part_of(guide: Guide) -> dict[str, Any]:
    """The guide as one grammar of those llguidance takes."""
    if guide.grammar is not None:
        return {"lark_grammar": guide.grammar}
    if guide.regex is not None:
        part: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(guide.regex))["grammars"][0]
        return {"lark_grammar": part["lark_grammar"]}
    if guide.choice is not None:
        return {"lark_grammar": "start: " + " | ".join(json.dumps(text) for text in guide.choice)}
    if guide.json_schema is False:
        return {"json_schema": False}
    asked = guide.json_schema if isinstance(guide.json_schema, dict) else {}
    schema = {"type": "object"} if guide.json_object else asked
    _check_schema(schema)
    return {"json_schema": {**schema, "x-guidance": _JSON_OPTIONS}}


def _check_schema(schema: dict[str, Any]) -> None:
    """Refuse what the library takes and does not keep.

    Raises:
        InvalidGuideError: so many properties may be had by writing one of them twice.
    """
    inside: list[Any] = [schema]
    while inside:
        part = inside.pop()
        if isinstance(part, list):
            inside += part
        elif isinstance(part, dict):
            least, required = part.get("minProperties"), part.get("required")
            known = len(set(map(str, required))) if isinstance(required, list) else 0
            if isinstance(least, int) and least > known + 1:
                raise InvalidGuideError(
                    f"expected minProperties of at most {known + 1}, which is one more than what is "
                    f"required, found {least}; name the properties in required",
                    kind="json_schema",
                )
            for key, value in part.items():
                if key in _MAPS and isinstance(value, dict):
                    inside += value.values()
                elif key not in _LITERAL:
                    inside.append(value)


def _kind_of(guide: Guide) -> str:
    kind: str = next(iter(msgspec.to_builtins(guide)))
    return kind


def _digest(guide: Guide) -> bytes:
    # Not sorted: an answer's properties come in the order that the schema has them in.
    return hashlib.blake2b(msgspec.msgpack.encode(guide), digest_size=16).digest()


def _invalid(kind: str, said: str) -> InvalidGuideError:
    """What the library, or the trial, said of a guide."""
    place = _PLACE.match(said)
    plain = said if place is None else said[place.end() :]
    # Of the others the grammar is ours: where it is wrong in that says nothing.
    where = f"line {place[1]}, column {place[2]}" if place is not None and kind == "grammar" else ""
    return InvalidGuideError(explanation_of(plain), kind=kind, where=where)
