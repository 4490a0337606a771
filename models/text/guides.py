"""Guides (constrained decoding): a mask over the vocabulary for the next token of an answer. Uses llguidance.

    Guide ── grammar ── tried in a separate process ── compiled and cached ── one matcher per answer

A `Matcher` is a fold over the tokens of an answer: a new one that is given the same tokens, in any pieces,
allows the same. It works on the bytes of tokens, so the model may spell a text with any tokens; no token is
forced.

The end of an answer is not a token here: the result states for each place whether the answer may end there.
"""

import codecs
import hashlib
import json
import re
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from queue import LifoQueue
from threading import Lock
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from models.text import guide_trial
from models.text.detokenizer import DetokenizerFactory
from models.text.guide_cost import CpuTime, problem_of_multiples
from models.text.guide_errors import explanation_of
from models.text.json_schema.errors import UnsupportedSchemaError
from models.text.json_schema.prepare import prepared_schema
from models.text.reasoning import ReasoningFormat
from models.text.reasoning_parser import ReasoningParser
from models.text.trial_process import TrialProcess
from shared.errors import BugError, ClientError
from shared.events import Guide, GuideReasoning

_KEPT: Final = 32
"""The number of compiled guides in the cache; one takes 25 MB at most, most take some KB."""
_REFUSALS_KEPT: Final = 4096
"""The number of refused guides that are remembered; one takes less than 1 KB."""
TRIALS: Final = 2
"""The number of guides that can be tried at a time."""
_WHITESPACE: Final = r"[ ]|\n[ ]{0,40}|\n\t{0,20}"
"""White space between tokens of JSON: a space, or a new line with indentation. It is bounded, because a model
might write white space until its answer is full."""
_JSON_OPTIONS: Final = {
    "whitespace_flexible": True,
    "whitespace_pattern": _WHITESPACE,
    # No \uXXXX: patterns and property names do not match escaped characters.
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}
_GAP: Final = r"gap: /[ \n]{0,4}/"
"""White space between the reasoning and the guided answer."""
_SHARED: Final = "lexer error"
"""Start of the error for a limit that all matchers of a guide share."""
_PLACE: Final = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
"""The place of an error in a grammar: line and column."""


class InvalidGuideError(ClientError):
    """A guide is invalid, uses something unsupported, or is too expensive.

    Attributes:
        what: the reason, without the name of the parameter.
    """

    code = "invalid_guide"

    def __init__(self, what: str, *, kind: str = "", where: str = "") -> None:
        super().__init__(": ".join(part for part in (kind, where, what) if part))
        self.what: Final = what
        self._kind = kind
        self._where = where

    def repeated(self) -> "InvalidGuideError":
        """The same error, to be raised for another request."""
        return InvalidGuideError(self.what, kind=self._kind, where=self._where)


class Allowed(NamedTuple):
    """The tokens that a guide allows next.

    Attributes:
        bits: a bit per token, lowest bit first: (ceil(vocabulary / 8),) uint8. A view of the matcher's
            buffer, which is overwritten for the next token.
        may_end: the answer may end here.
    """

    bits: npt.NDArray[np.uint8]
    may_end: bool


class GuideCompiler:
    """Checks and compiles guides for one vocabulary, with a cache. Re-entrant.

    Args:
        tokens: the bytes of each token in a text; of a special token its name. They are kept: the limit of a
            guide's reasoning is counted in tokens.
        marks: the special tokens.
        drops_space: a leading space of the first token is not part of the text (Llama 2's tokenizer).
    """

    def __init__(self, tokens: Sequence[bytes], marks: Sequence[int], *, drops_space: bool) -> None:
        self._marks = frozenset(marks)
        self._mark_names = [tokens[mark].decode(errors="replace") for mark in marks]
        self._vocab_size = len(tokens)
        self._tokens = tokens
        self._tokenizer = guide_trial.Vocabulary(tokens, list(marks)).compiled()
        self._drops_space = drops_space
        self._kept: OrderedDict[bytes, CompiledGuide] = OrderedDict()
        self._refused: OrderedDict[bytes, InvalidGuideError] = OrderedDict()
        self._lock = Lock()
        self._trials: LifoQueue[TrialProcess] = LifoQueue()
        for _ in range(TRIALS):
            self._trials.put(TrialProcess(self._mark_names))

    def known(self, guide: Guide) -> "CompiledGuide | None":
        """The guide if it has been compiled, None if it has yet to be checked. It does not block.

        Raises:
            InvalidGuideError: it has been refused, or is banned because a matcher of it did not end.
        """
        digest = _digest(guide)
        found = self._find(guide)
        if found is not None and found.banned:
            raise InvalidGuideError(found.banned)
        with self._lock:
            refused = self._refused.get(digest)
            if refused is not None:
                self._refused.move_to_end(digest)
        if refused is not None:
            raise refused.repeated()
        return found

    def check(self, guide: Guide, cpu_time: CpuTime | None = None) -> "CompiledGuide":
        """Check a client's guide: try it in a separate process, then compile it into the cache.

        Raises:
            InvalidGuideError: it cannot be followed, or is banned because a matcher of it did not end.
            CapacityError: it could not be tried.
        """
        known = self.known(guide)
        if known is not None:
            return known
        cpu_time = cpu_time if cpu_time is not None else CpuTime()
        begun_s = time.thread_time()
        try:
            if problem := problem_of_multiples(guide.json_schema):
                raise InvalidGuideError(problem, kind="json_schema")
            self._try(guide, cpu_time)
            return self.compiled(guide)
        except InvalidGuideError as error:
            with self._lock:
                self._refuse(_digest(guide), error.repeated())
            raise
        finally:
            cpu_time.seconds += time.thread_time() - begun_s

    def _refuse(self, digest: bytes, error: InvalidGuideError) -> None:
        """Remember a refusal; the lock is held."""
        self._refused[digest] = error
        while len(self._refused) > _REFUSALS_KEPT:
            self._refused.popitem(last=False)

    def compiled(self, guide: Guide) -> "CompiledGuide":
        """A guide, compiled. Only for guides that were checked, by this worker or another one.

        Raises:
            InvalidGuideError: it is invalid, or no text satisfies it.
        """
        found = self._find(guide)
        if found is not None:
            return found
        made = CompiledGuide(
            self._grammar(guide),
            self._compile,
            marks=self._marks,
            tokens=self._tokens,
            kind=_kind_of(guide),
            reasoning=guide.reasoning,
            closing=self._closing_grammar(guide),
        )
        made.matcher().push(())
        with self._lock:
            self._kept[_digest(guide)] = made
            while len(self._kept) > _KEPT:
                digest, oldest = self._kept.popitem(last=False)
                if oldest.banned:
                    self._refuse(digest, InvalidGuideError(oldest.banned))
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
        """The guide as llguidance's JSON."""
        answer = '" " @guide' if self._drops_space else "@guide"
        found = guide.reasoning
        if found is None:
            return _whole(guide, f"start: {answer}")
        thought = f"thought[suffix={json.dumps(found.closes)}]: /(.|\\n)*/\n{_GAP}"
        if found.is_open:
            return _whole(guide, f"start: thought gap @guide\n{thought}")
        opens = json.dumps((" " if self._drops_space else "") + found.opens)
        return _whole(guide, f"start: {answer} | {opens} thought gap @guide\n{thought}")

    def _closing_grammar(self, guide: Guide) -> str:
        """What follows once the reasoning has reached its limit; empty without one."""
        found = guide.reasoning
        if found is None or found.max_tokens is None:
            return ""
        return _whole(guide, f"start: {json.dumps(found.closes)} gap @guide\n{_GAP}")

    def _try(self, guide: Guide, cpu_time: CpuTime) -> None:
        """Try a client's guide in a separate process.

        Raises:
            InvalidGuideError: it is invalid, or too expensive.
            CapacityError: it could not be tried.
        """
        if guide.choice is not None or guide.json_object:
            return  # their grammars are always cheap
        grammar = self._grammar(guide)
        trial = self._trials.get()
        try:
            verdict = trial.verdict_of(grammar)
        finally:
            self._trials.put(trial)
        cpu_time.seconds += verdict["cpu_s"]
        kind = _kind_of(guide)
        if verdict["error"]:
            raise _invalid(kind, verdict["error"])
        match verdict["ended_by"]:
            case 0:
                return
            case signal.SIGPROF:
                raise InvalidGuideError(
                    f"it takes more than {guide_trial.CPU_S:g} s to compile; make it smaller", kind=kind
                )
            case _:
                raise InvalidGuideError(
                    "it is nested too deeply, or takes too much memory; make it smaller", kind=kind
                )


def guide_compiler_of(decoders: DetokenizerFactory, vocab_size: int) -> GuideCompiler | None:
    """The compiler for a model's vocabulary; None if a text is not the concatenation of its tokens' bytes."""
    spelling = decoders.spelling(vocab_size)
    if spelling is None:
        return None
    marks = sorted(id for id in decoders.marks if id < vocab_size)
    return GuideCompiler(spelling.tokens, marks, drops_space=spelling.drops_space)


class CompiledGuide:
    """A compiled guide. Its matchers share the library's lexer states.

    Attributes:
        banned: the reason why the guide may no longer be used; empty while it may.
        on_ban: is called when the guide is banned, in the engine's thread.
    """

    def __init__(
        self,
        grammar: str,
        compile_: Callable[[str], LLMatcher],
        *,
        marks: frozenset[int],
        tokens: Sequence[bytes],
        kind: str,
        reasoning: GuideReasoning | None = None,
        closing: str = "",
    ) -> None:
        self.marks: Final = marks
        self.vocab_size: Final = len(tokens)
        self.banned = ""
        self.on_ban: Callable[[], object] | None = None
        self._grammars = {False: grammar, True: closing}
        self._compile = compile_
        self._kind = kind
        self._tokens = tokens
        self._reasoning = reasoning
        self._first: dict[bool, LLMatcher] = {}
        self._lock = Lock()

    def matcher(self) -> "Matcher":
        """A new matcher, at the start of an answer."""
        return Matcher(self)

    def budget(self) -> "ReasoningBudget | None":
        """The count of the reasoning of a new answer; None without a limit."""
        found = self._reasoning
        if found is None or found.max_tokens is None:
            return None
        return ReasoningBudget(found, found.max_tokens, self._tokens)

    def begin(self, *, is_closing: bool = False) -> LLMatcher:
        """A new matcher of the library, which shares states with the others of this guide.

        `is_closing`: it begins with the closing mark of the reasoning, and not at the start of the answer.

        Raises:
            InvalidGuideError: the guide is invalid.
        """
        with self._lock:
            if is_closing not in self._first:
                self._first[is_closing] = self.begin_alone(is_closing=is_closing)
            return self._first[is_closing].deep_copy()

    def begin_alone(self, *, is_closing: bool = False) -> LLMatcher:
        """A new matcher of the library that shares nothing."""
        made = self._compile(self._grammars[is_closing])
        if made.is_error():
            raise self.invalid(made)
        return made

    def leave(self) -> None:
        """Discard the shared states, which are used up; later matchers share new ones."""
        with self._lock:
            self._first.clear()

    def ban(self) -> None:
        """Ban the guide: one of its matchers does not end, and all that share with it would wait."""
        self.banned = InvalidGuideError(
            "expected a guide whose next tokens are computed quickly, found one that takes too long; "
            "give it fewer ways to read one text",
            kind=self._kind,
        ).message
        if self.on_ban is not None:
            self.on_ban()

    def invalid(self, matcher: LLMatcher) -> InvalidGuideError:
        """The error for a matcher that failed."""
        return _invalid(self._kind, matcher.get_error())


class ReasoningBudget:
    """Counts the tokens of an answer while it is reasoning: a fold over them."""

    def __init__(self, reasoning: GuideReasoning, most: int, tokens: Sequence[bytes]) -> None:
        marks = ReasoningFormat(name="", opens=reasoning.opens, closes=reasoning.closes)
        self._parser = ReasoningParser(marks, is_inside=reasoning.is_open)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._most = most
        self._tokens = tokens
        self._count = 0
        self._is_counting = True

    def is_spent_after(self, token_id: int | None) -> bool:
        """Count the next token; true if the reasoning has to be closed now. None counts nothing.

        A character of several tokens is completed first.
        """
        if not self._is_counting:
            return False
        if token_id is not None:
            self._count += 1
            self._parser.push(self._decoder.decode(self._tokens[token_id]))
        is_within_character = bool(self._decoder.getstate()[0])
        is_spent = self._parser.is_inside and self._count >= self._most and not is_within_character
        self._is_counting = not (is_spent or self._parser.has_ended)
        return is_spent


class Matcher:
    """The state of one answer in a guide. Not thread-safe."""

    def __init__(self, compiled: CompiledGuide) -> None:
        self._compiled = compiled
        self._inner: LLMatcher | None = None
        self._ids: list[int] = []
        self._budget = compiled.budget()
        self._begin = 0  # the index of the first token that `_inner` follows
        self._is_closing = self._budget is not None and self._budget.is_spent_after(None)
        # One bit more than there are tokens: the library's end token.
        self._words = np.zeros(compiled.vocab_size // 32 + 1, np.uint32)
        self._bits = self._words.view(np.uint8)

    @property
    def tokens(self) -> int:
        """The number of tokens so far."""
        return len(self._ids)

    def ban(self) -> None:
        """Ban the guide: this matcher does not end."""
        self._compiled.ban()

    def push(self, token_ids: Sequence[int]) -> Allowed:
        """Append tokens to the answer; return what is allowed next.

        Raises:
            InvalidGuideError: the guide is too expensive, is banned, or allows nothing.
            BugError: a token is not allowed.
        """
        first = len(self._ids)
        self._ids += token_ids
        if self._budget is not None:
            for index, token_id in enumerate(token_ids, first):
                if self._budget.is_spent_after(token_id):
                    self._inner, self._is_closing, self._begin = None, True, index + 1
        if self._inner is None:
            self._inner = self._compiled.begin(is_closing=self._is_closing)
        if not self._follow(self._inner, self._ids[max(first, self._begin) :]):
            if not self._inner.get_error().startswith(_SHARED):
                raise self._compiled.invalid(self._inner)
            # The number of shared states is limited, and other answers have used some of them. The result
            # must not depend on other answers, so it is repeated with fresh states.
            self._compiled.leave()
            self._inner = self._compiled.begin_alone(is_closing=self._is_closing)
            if not self._follow(self._inner, self._ids[self._begin :]):
                raise self._compiled.invalid(self._inner)
        end = self._compiled.vocab_size
        may_end = bool(self._bits[end >> 3] >> (end & 7) & 1)
        self._bits[end >> 3] &= ~np.uint8(1 << (end & 7))
        return Allowed(self._bits[: (end + 7) // 8], may_end)

    def _follow(self, inner: LLMatcher, token_ids: Sequence[int]) -> bool:
        """Append tokens and compute the mask after them; return false if a limit was reached.

        One token at a time: the library holds the GIL meanwhile, and an answer may have many slow tokens.
        """
        for token_id in token_ids:
            self._check_banned()
            if not inner.try_consume_tokens([token_id]):
                if inner.is_error():
                    return False
                raise BugError(f"a guide does not allow the token {token_id} that was chosen")
        self._check_banned()
        inner.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        return not inner.is_error()

    def _check_banned(self) -> None:
        if self._compiled.banned:
            raise InvalidGuideError(self._compiled.banned)


def _whole(guide: Guide, start: str) -> str:
    """Llguidance's JSON for a guide, as `@guide` within the rules of `start`."""
    whole = {"lark_grammar": f'%llguidance {{"no_forcing": true}}\n{start}'}
    return json.dumps({"grammars": [whole, {"name": "guide", **_part_of(guide)}]})


def _part_of(guide: Guide) -> dict[str, Any]:
    """The guide as one of llguidance's grammars."""
    if guide.grammar is not None:
        return {"lark_grammar": guide.grammar}
    if guide.regex is not None:
        part: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(guide.regex))["grammars"][0]
        return {"lark_grammar": part["lark_grammar"]}
    if guide.choice is not None:
        return {"lark_grammar": "start: " + " | ".join(json.dumps(text) for text in guide.choice)}
    if guide.json_schema is False:
        return {"json_schema": False}
    own = guide.json_schema if isinstance(guide.json_schema, dict) else {}
    schema = {"type": "object"} if guide.json_object else own
    try:
        return {"json_schema": {**prepared_schema(schema), "x-guidance": _JSON_OPTIONS}}
    except UnsupportedSchemaError as error:
        raise InvalidGuideError(str(error), kind="json_schema") from error


def _kind_of(guide: Guide) -> str:
    kind: str = next(iter(msgspec.to_builtins(guide)))
    return kind


def _digest(guide: Guide) -> bytes:
    # Not sorted: the order of properties in a schema is that of the answer.
    return hashlib.blake2b(msgspec.msgpack.encode(guide), digest_size=16).digest()


def _invalid(kind: str, error: str) -> InvalidGuideError:
    """The error for a message of the library, or of the trial."""
    place = _PLACE.match(error)
    plain = error if place is None else error[place.end() :]
    # Other guides are translated to a grammar, in which a place means nothing to the client.
    where = f"line {place[1]}, column {place[2]}" if place is not None and kind == "grammar" else ""
    return InvalidGuideError(explanation_of(plain), kind=kind, where=where)
