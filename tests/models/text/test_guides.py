"""Guides: supported ones, refused ones with their reasons, and hostile ones that must not harm a worker."""

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from llguidance import LLParserLimits
from tokenizers import Tokenizer

from models.text import guide_trial
from models.text import guides as module
from models.text.detokenizer import DetokenizerFactory, Spelling
from models.text.guides import CompiledGuide, GuideCompiler, InvalidGuideError
from shared.errors import BugError
from shared.events import Guide, GuideReasoning
from tests.models import written_checkpoints
from tests.models.text.json_schema.guided_texts import accepts

ROOT = Path(__file__).parents[3]
PIECES = ['"', "{", "}", "[", "]", ",", ":", " ", "\n", "\t", "-", ".", "null", "true", "false", '": ', '{"']
MARKS = ["<|end|>", "<|call|>"]


def vocabulary() -> GuideCompiler:
    """Every byte, some pieces, two special tokens, and a token outside the tokenizer's vocabulary."""
    tokens = [*(bytes([byte]) for byte in range(256)), *(piece.encode() for piece in PIECES)]
    marks = range(len(tokens), len(tokens) + len(MARKS))
    return GuideCompiler([*tokens, *(mark.encode() for mark in MARKS), b""], list(marks), drops_space=False)


@pytest.fixture(scope="module")
def bytes_and_pieces() -> GuideCompiler:
    return vocabulary()


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"choice": ["yes", "yes!", 'a"\n\\', "é😀"]}, ["yes", "yes!", 'a"\n\\', "é😀"], ["", "y", "é"]),
        ({"regex": "a+b|c"}, ["ab", "aab", "c"], ["", "a", "abc", "cab"]),
        ({"regex": "^a/[/\\]]$"}, ["a//", "a/]"], ["a", "/a//"]),
        ({"grammar": 'start: (A ",")* A\nA: /[0-9]+/'}, ["1", "1,22,3"], ["", "1,", ",1"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}', '{\n    "é": "\\n"\n}'], ["[]", "1", ""]),
        ({"json_schema": True}, ["{}", "1.5", '"x"', "[null]"], ["", "nil"]),
        ({"json_schema": {"type": "integer", "minimum": 5}}, ["5", "61"], ["4", "5.0", "05"]),
        ({"json_schema": {"enum": [1, "a", None]}}, ["1", '"a"', "null"], ["a", "2"]),
        (
            {"json_schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
            ["[]", "[true,false]", "[true, false]", "[\n  true,\n  false\n]", "[\n\t\ttrue\n]"],
            ["[true,false,true]", "[ " + " " * 4 + "true]", "[\n\n\ntrue]", "\n[]", "[] "],
        ),
    ],
)  # fmt: skip
def test_what_a_guide_allows(
    bytes_and_pieces: GuideCompiler, asked: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    guide = bytes_and_pieces.compiled(Guide(**asked))

    assert [text for text in good if not accepts(guide, text)] == []
    assert [text for text in bad if accepts(guide, text)] == []


def test_properties_come_in_the_order_of_the_schema(bytes_and_pieces: GuideCompiler) -> None:
    def ordered(*names: str) -> CompiledGuide:
        properties = {name: {"type": "null"} for name in names}
        schema = {"type": "object", "properties": properties, "required": [*names]}
        return bytes_and_pieces.compiled(Guide(json_schema=schema))

    assert accepts(ordered("b", "a"), '{"b":null,"a":null}')
    assert not accepts(ordered("b", "a"), '{"a":null,"b":null}')
    assert accepts(ordered("a", "b"), '{"a":null,"b":null}')


def test_characters_are_not_escaped_so_that_patterns_and_names_apply(
    bytes_and_pieces: GuideCompiler,
) -> None:
    named = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "null"}}
    objects = bytes_and_pieces.compiled(Guide(json_schema={"type": "object", **named}))
    texts = bytes_and_pieces.compiled(Guide(json_schema={"type": "string", "pattern": "^[^a]$"}))

    assert accepts(objects, '{"a":1,"b":null}')
    assert not accepts(objects, '{"\\u0061":null}')
    assert not accepts(objects, '{"a":1,"a":null}')
    assert accepts(texts, '"é"')
    assert not accepts(texts, '"\\u0061"')


def test_min_properties_is_enforced_up_to_one_more_than_required(bytes_and_pieces: GuideCompiler) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"minProperties": {"const": {"minProperties": 9}}},
        "required": ["minProperties"],
        "additionalProperties": {"type": "null"},
        "minProperties": 2,
    }
    guide = bytes_and_pieces.compiled(Guide(json_schema=schema))

    assert accepts(guide, '{"minProperties":{"minProperties":9},"x":null}')
    assert not accepts(guide, '{"minProperties":{"minProperties":9}}')


@pytest.mark.processes
def test_a_schema_cannot_change_how_strictly_it_is_enforced(bytes_and_pieces: GuideCompiler) -> None:
    lenient = {"type": "integer", "x-guidance": {"lenient": True, "whitespace_pattern": "x"}}

    assert not accepts(bytes_and_pieces.compiled(Guide(json_schema=lenient)), "1x")
    with pytest.raises(InvalidGuideError, match='found "not"; leave them out'):
        bytes_and_pieces.check(Guide(json_schema={**lenient, "not": {"const": 1}}))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"json_schema": {"type": "nonsense"}}, "^json_schema: expected .*, found nonsense; name one"),
        ({"json_schema": {"uniqueItems": True, "type": "array"}}, 'found "uniqueItems"; leave them out'),
        ({"json_schema": {"if": {}, "then": {}}}, 'found "if", "then"; leave them out'),
        ({"json_schema": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "found others; give each"),
        ({"json_schema": {"type": "string", "format": "iri"}}, "found iri; use a pattern"),
        ({"json_schema": {"type": "string", "pattern": "("}}, "error: unclosed group; correct it$"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 4}}, r"\(5\) is .*; resolve the"),
        ({"json_schema": {"properties": {"a": {}, "b": {}}, "maxProperties": 1}}, "one; name all"),
        ({"json_schema": {"patternProperties": {"a": {}, "b": {}}}}, "found /a/ and /b/; make them exclude"),
        ({"json_schema": False}, "schema is false; resolve the contradiction"),
        ({"json_schema": {"type": "object", "minProperties": 2}}, "at most 1, .*, found 2; name"),
        (
            {"json_schema": {"items": {"properties": {"const": {"required": ["a"], "minProperties": 3}}}}},
            "minProperties of at most 2, .*, found 3; name",
        ),
        ({"json_schema": {"$ref": "http://example.com/s.json"}}, "found http://.*; copy the target"),
        ({"json_schema": {"$ref": "#/$defs/a"}}, r"found #/\$defs/a, which does not exist; add it"),
        ({"json_schema": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "no text sat"),
        ({"json_schema": {"properties": 5}}, "this is not supported: properties must be"),
        ({"regex": "["}, "^regex: expected .* a syntax error: unclosed character class; correct it$"),
        ({"regex": r"(a)\1"}, "^regex: expected .* without backreferences, found one; repeat"),
        ({"regex": "(?=a)b"}, "without look-around, .*; describe the text"),
        ({"regex": r"\bword\b"}, "without look-around, .*; describe the text"),
        ({"grammar": "start: x"}, 'grammar: line 1, column 8: expected names .*, found "x"; add a rule'),
        ({"grammar": "%%% (("}, "line 1, column 2: .* dialect of Lark, found a syntax error"),
        ({"grammar": 'rule: "a"'}, "a rule with the name start, found none; add it"),
        ({"grammar": 'start: "a"\nstart: "b"'}, 'line 2, .* found "start" twice; join them'),
        ({"grammar": 'start: start "a"'}, "no text satisfies it; give each rule"),
        ({"grammar": "start: <|nobody|>"}, r"special tokens, .*call.*; found .*nobody.*; name"),
    ],
)  # fmt: skip
def test_unsupported_guides_are_refused_with_a_reason(
    bytes_and_pieces: GuideCompiler, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidGuideError, match=said) as refused:
        bytes_and_pieces.check(Guide(**asked))

    assert (refused.value.code, refused.value.status) == ("invalid_guide", 400)
    assert len(refused.value.message) < 500
    assert "start: @guide" not in refused.value.message


REFUSED = [
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
    "$dynamicRef",
]  # fmt: skip
KEPT: dict[str, Any] = {
    "type": "string", "const": 1, "enum": [1], "anyOf": [{}], "allOf": [{}], "oneOf": [{}], "$defs": {},
    "$ref": "#", "definitions": {}, "minLength": 1, "maxLength": 9, "pattern": "a", "format": "uuid",
    "minimum": 1, "maximum": 9, "exclusiveMinimum": 1, "exclusiveMaximum": 9, "multipleOf": 3, "items": {},
    "prefixItems": [{}], "additionalItems": {}, "minItems": 1, "maxItems": 9, "properties": {"a": {}},
    "required": ["a"], "additionalProperties": False, "patternProperties": {"^a$": {}}, "minProperties": 1,
    "maxProperties": 9, "title": "", "description": "", "default": 1, "examples": [1], "$comment": "",
    "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "urn:x", "deprecated": True,
    "readOnly": True, "writeOnly": True,
}  # fmt: skip


def test_the_keywords_that_are_refused_are_those_the_page_names(bytes_and_pieces: GuideCompiler) -> None:
    page = (
        (ROOT / "docs/http.md").read_text().partition("### Keywords of JSON schemas")[2].partition("\n##")[0]
    )
    taken, _, refused = page.partition("| refused")
    for keyword in REFUSED:
        assert f"`{keyword}`" in refused
        with pytest.raises(InvalidGuideError, match=re.escape(f'found "{keyword}"')):
            bytes_and_pieces.compiled(Guide(json_schema={keyword: {}}))
    for keyword, value in KEPT.items():
        assert f"`{keyword}`" in taken
        # A reference to the whole schema is satisfied by no text, but it is enforced.
        schema = (
            {keyword: value} if keyword != "$ref" else {"type": ["null", "array"], "items": {"$ref": "#"}}
        )
        bytes_and_pieces.compiled(Guide(json_schema=schema))


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "hours of comparing": (
        {"json_schema": {"type": "object", "patternProperties": {f"^a{n}b$": {} for n in range(800)}}},
        "more than 1 s",
    ),
    "a stack that overflows": (
        {"grammar": "\n".join(["start: r0", *(f"r{n}: r{n + 1}" for n in range(6000)), 'r6000: "a"'])},
        "too deeply",
    ),
    "definitions that overflow it": (
        {"json_schema": {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(2000)}
            | {"d2000": {"type": "null"}},
        }},
        "too deeply",
    ),
    "too many choices at once": (
        {"json_schema": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}}},
        r"more than \d+ items|found \d+ items of at most 1000; give it fewer optional properties",
    ),
    "too many states": ({"regex": "a?" * 2000 + "a" * 2000}, "regex: expected .*, found too many; give it"),
}  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize(("asked", "said"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_guide_is_refused_in_bounded_time(
    bytes_and_pieces: GuideCompiler, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidGuideError, match=said):
        bytes_and_pieces.check(Guide(**asked))


@pytest.mark.processes
def test_large_harmless_guides_are_accepted(bytes_and_pieces: GuideCompiler) -> None:
    properties = {f"p{n}": {"type": ("string", "number")[n % 2]} for n in range(240)}
    bytes_and_pieces.check(Guide(json_schema={"type": "object", "properties": properties}))
    everything = {f"p{n}": {"type": "string"} for n in range(1000)}
    bytes_and_pieces.check(
        Guide(json_schema={"type": "object", "properties": everything, "required": [*everything]})
    )
    bytes_and_pieces.check(Guide(json_schema={"enum": [f"value {n} of many" for n in range(2000)]}))
    bytes_and_pieces.check(Guide(choice=[f"choice number {n}" for n in range(1024)]))


@pytest.mark.processes
def test_parser_items_are_limited_by_count_and_not_by_time(
    bytes_and_pieces: GuideCompiler,
) -> None:
    def optional(count: int) -> Guide:
        properties = {f"p{number}": {"type": "string"} for number in range(count)}
        return Guide(json_schema={"type": "object", "properties": properties})

    bytes_and_pieces.check(optional(248))
    with pytest.raises(InvalidGuideError, match="found 1003 items of at most 1000; give it fewer"):
        bytes_and_pieces.check(optional(249))


@pytest.mark.slow
def test_an_ambiguous_text_is_matched_up_to_the_limit_of_items(
    bytes_and_pieces: GuideCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no second try with fresh states, because the limit concerns this answer alone."""
    pairs = "x x | x y | x z | y x | y y | y z | z x | z y | z z"
    rules = "\n".join(f'{name}: {pairs} | "a"' for name in "xyz")
    matcher = bytes_and_pieces.compiled(Guide(grammar=f"start: x\n{rules}")).matcher()
    for _ in range(18):
        matcher.push(b"a")
    monkeypatch.delattr(CompiledGuide, "begin_alone")

    with pytest.raises(InvalidGuideError, match="found 1035 items of at most 1000; give it fewer"):
        matcher.push(b"a")


def test_matching_many_tokens_stops_when_the_guide_is_banned() -> None:
    """Tokens are appended one by one, because the library holds the GIL during each call."""
    guide = vocabulary().compiled(Guide(regex="a+"))
    matcher, asked = guide.matcher(), list[list[int]]()

    class Inner:
        def try_consume_tokens(self, token_ids: list[int]) -> int:
            asked.append(token_ids)
            if len(asked) == 3:
                guide.ban()
            return 1

    inner: Any = Inner()
    matcher._inner = inner  # how long the library takes for a token is not ours to choose

    with pytest.raises(InvalidGuideError, match="takes too long"):
        matcher.push(b"aaaaaaa")

    assert asked == [[97]] * 3


@pytest.mark.processes
def test_a_banned_guide_is_refused_from_then_on() -> None:
    guides, asked = vocabulary(), Guide(regex="a+")
    guides.check(asked)
    one, other = guides.compiled(asked).matcher(), guides.compiled(asked).matcher()
    other.push(b"a")

    one.ban()

    for refused in (lambda: other.push(b"a"), lambda: one.push(()), lambda: guides.check(asked)):
        with pytest.raises(InvalidGuideError, match="found one that takes too long; give it"):
            refused()
    guides.check(Guide(regex="a"))


# ---- matching ------------------------------------------------------------------------------------


def test_matching_does_not_depend_on_the_pieces(bytes_and_pieces: GuideCompiler) -> None:
    guide = bytes_and_pieces.compiled(Guide(regex="([a-z]{2,5} )+end"))
    text = list(b"some words at the end")
    by_one = guide.matcher()
    for token in text:
        last = by_one.push([token])
    whole, halves = guide.matcher().push(text), guide.matcher()
    halves.push(text[:9])
    rest = halves.push(text[9:])

    for found in (whole, rest):
        assert np.array_equal(found.bits, last.bits)
        assert found.may_end is last.may_end is True
    assert by_one.tokens == halves.tokens == len(text)


def test_special_tokens_are_allowed_only_where_a_grammar_names_them(bytes_and_pieces: GuideCompiler) -> None:
    call = 256 + len(PIECES) + 1
    anything = bytes_and_pieces.compiled(Guide(regex="(.|\n)*"))
    named = bytes_and_pieces.compiled(Guide(grammar='start: <|call|> "(" /[a-z]+/ ")"'))

    assert np.unpackbits(anything.matcher().push(()).bits, bitorder="little")[call - 1 :].sum() == 0
    matcher = named.matcher()
    assert np.unpackbits(matcher.push(()).bits, bitorder="little").nonzero()[0].tolist() == [call]
    assert np.unpackbits(matcher.push([call]).bits, bitorder="little").nonzero()[0].tolist() == [ord("(")]


def limited(monkeypatch: pytest.MonkeyPatch, states: int) -> GuideCompiler:
    limits = LLParserLimits(max_lexer_states=states, verbose_errors=False)
    monkeypatch.setattr(guide_trial, "limits", lambda: limits)
    return vocabulary()


def test_states_that_others_used_up_are_replaced(
    bytes_and_pieces: GuideCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All matchers of a grammar share its states and their limit; each alone has enough of them."""
    asked = Guide(regex="(a|b)*a(a|b){9}c")
    plenty = bytes_and_pieces.compiled(asked)
    scarce = limited(monkeypatch, 150).compiled(asked)
    left: list[CompiledGuide] = []

    def leave(guide: CompiledGuide) -> None:
        left.append(guide)
        really_leave(guide)

    really_leave = CompiledGuide.leave
    monkeypatch.setattr(CompiledGuide, "leave", leave)
    random = np.random.default_rng(1)

    for _ in range(30):
        one, other = scarce.matcher(), plenty.matcher()
        for byte in random.choice(list(b"ab"), 20).tolist():
            found, expected = one.push([byte]), other.push([byte])
            assert np.array_equal(found.bits, expected.bits)
            assert found.may_end == expected.may_end

    assert left == [scarce] * len(left) != []


def test_a_guide_over_the_limit_by_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = limited(monkeypatch, 50).compiled(Guide(regex="[a-z]{1,400}")).matcher()

    with pytest.raises(InvalidGuideError, match="found too many; give it"):
        matcher.push([97] * 300)


def test_a_token_that_is_not_allowed_is_a_bug(bytes_and_pieces: GuideCompiler) -> None:
    guide = bytes_and_pieces.compiled(Guide(regex="abc"))

    with pytest.raises(BugError, match="does not allow the token 120"):
        guide.matcher().push(list(b"abx"))

    assert accepts(guide, "abc")


# ---- cache ---------------------------------------------------------------------------------------


def test_a_guide_is_tried_and_compiled_once_while_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    guides = vocabulary()
    tried: list[Guide] = []
    monkeypatch.setattr(guides, "_try", lambda guide, _: tried.append(guide))
    monkeypatch.setattr(module, "_KEPT", 2)
    first, second, third = (Guide(regex=text) for text in "abc")

    for asked in (first, first, second, first, third, first, second):
        guides.check(asked)

    assert tried == [first, second, third, second]
    assert guides.compiled(first) is guides.compiled(Guide(regex="a"))


@pytest.mark.processes
def test_the_checked_guide_is_the_compiled_one(bytes_and_pieces: GuideCompiler) -> None:
    asked = Guide(json_schema={"const": "kept"})
    bytes_and_pieces.check(asked)

    assert accepts(bytes_and_pieces.compiled(asked), '"kept"')


# ---- tokenizers ----------------------------------------------------------------------------------


def guides_of(tokenizer: Tokenizer) -> tuple[GuideCompiler, Spelling]:
    decoders = DetokenizerFactory(tokenizer)
    spelling = decoders.spelling(tokenizer.get_vocab_size())
    assert spelling is not None
    return GuideCompiler(spelling.tokens, sorted(decoders.marks), drops_space=spelling.drops_space), spelling


@pytest.mark.parametrize("kind", [written_checkpoints.byte_level, written_checkpoints.sentence_piece])
def test_an_allowed_spelling_decodes_to_the_text(kind: Any) -> None:
    """Llama 2's decoder drops a leading space, so the allowed tokens have one more."""
    tokenizer = kind()
    guides, _ = guides_of(tokenizer)
    texts = [" two", "two", "naïve café", '{"a":  1}', "<tool→call>", "\n x"]
    guide, decoders = guides.compiled(Guide(choice=texts)), DetokenizerFactory(tokenizer)
    random = np.random.default_rng(1)
    found: set[str] = set()
    for _ in range(300):
        matcher, ids = guide.matcher(), list[int]()
        bits, may_end = matcher.push(())
        while not may_end:
            ids.append(int(random.choice(np.unpackbits(bits, bitorder="little").nonzero()[0])))
            bits, may_end = matcher.push(ids[-1:])
        decoder = decoders.new()
        found.add("".join(map(decoder.push, ids)) + decoder.flush())

    assert found == set(texts)


def test_a_tokenizer_whose_texts_are_not_its_tokens_bytes_has_no_spelling() -> None:
    tokenizer = written_checkpoints.word_piece()

    assert DetokenizerFactory(tokenizer).spelling(tokenizer.get_vocab_size()) is None


# ---- reasoning before a guided answer ----------------------------------------------------------------------

FREE = GuideReasoning(opens="<think>", closes="</think>")
OPEN = GuideReasoning(opens="<think>", closes="</think>", is_open=True)
CHANNELS = GuideReasoning(
    opens="<|channel|>analysis<|message|>", closes="<|end|><|start|>assistant<|channel|>final<|message|>"
)


def with_limit(reasoning: GuideReasoning, most: int) -> GuideReasoning:
    return msgspec.structs.replace(reasoning, max_tokens=most)


@pytest.mark.parametrize(
    ("reasoning", "good", "bad"),
    [
        (
            FREE,
            ["12", "<think>{a</think>12", "<think></think>\n\n12"],
            ["a", "<think>a</think>b", "</think>1"],
        ),
        (OPEN, ["a {</think>12", "</think>\n\n12", "é</think>1"], ["12", "<think>a", "a</think>\n\n\n\n\n1"]),
        (
            CHANNELS,
            [f"{CHANNELS.opens}a<|end|>b{CHANNELS.closes}12", "12"],
            [f"{CHANNELS.opens}a<|end|>12", f"{CHANNELS.closes}12"],
        ),
    ],
)
def test_free_text_may_come_before_a_guided_answer(
    bytes_and_pieces: GuideCompiler, reasoning: GuideReasoning, good: list[str], bad: list[str]
) -> None:
    guide = bytes_and_pieces.check(Guide(regex="[0-9]+", reasoning=reasoning))

    assert [text for text in good if not accepts(guide, text)] == []
    assert [text for text in bad if accepts(guide, text)] == []


@pytest.mark.parametrize(
    ("reasoning", "thought", "ended"),
    [
        (with_limit(OPEN, 3), "abc", "</think>1"),
        (with_limit(OPEN, 0), "", "</think>\n1"),
        (with_limit(FREE, 9), "<think>ab", "</think>1"),
        (with_limit(OPEN, 2), "aé", "</think>1"),
    ],
)
def test_reasoning_that_reaches_its_limit_has_to_be_closed(
    bytes_and_pieces: GuideCompiler, reasoning: GuideReasoning, thought: str, ended: str
) -> None:
    guide = bytes_and_pieces.check(Guide(regex="[0-9]+", reasoning=reasoning))
    matcher = guide.matcher()

    allowed = matcher.push(thought.encode())
    bits = np.unpackbits(allowed.bits, bitorder="little")
    assert [place for place, bit in enumerate(bits) if bit] == [ord("<")]

    assert accepts(guide, thought + ended)
    assert not accepts(guide, thought + "d" + ended)


def test_reasoning_within_its_limit_is_free(bytes_and_pieces: GuideCompiler) -> None:
    guide = bytes_and_pieces.check(Guide(regex="[0-9]+", reasoning=with_limit(OPEN, 20)))

    assert accepts(guide, "a</think>" + "1" * 30)
    assert accepts(guide, "a" * 11 + "</think>1")
    assert not accepts(guide, "a" * 20 + "b</think>1")


def test_text_that_does_not_begin_with_the_mark_has_no_limit(bytes_and_pieces: GuideCompiler) -> None:
    guide = bytes_and_pieces.check(Guide(grammar=r"start: /(.|\n)*/", reasoning=with_limit(FREE, 4)))

    assert accepts(guide, "<thin" + "x" * 40)


def test_a_limit_counts_the_same_however_the_tokens_come(bytes_and_pieces: GuideCompiler) -> None:
    guide = bytes_and_pieces.check(Guide(regex="[0-9]+", reasoning=with_limit(OPEN, 3)))
    text = b"abc</think>12"

    whole, by_one = guide.matcher().push(text), guide.matcher()
    for place in range(len(text)):
        last = by_one.push(text[place : place + 1])

    assert (last.bits == whole.bits).all()
    assert last.may_end is whole.may_end is True
