"""Guides: what can be followed, what is refused and why, and that no guide hangs or kills a worker."""

from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits
from tokenizers import Tokenizer

from shared.errors import BugError
from shared.events import Guide
from shared.models import guide_trial
from shared.models import guides as module
from shared.models.guides import CompiledGuide, Guides, InvalidGuideError
from shared.models.text_decoder import Spelling, TextDecoders
from tests.shared.models import checkpoints

PIECES = ['"', "{", "}", "[", "]", ",", ":", " ", "\n", "\t", "-", ".", "null", "true", "false", '": ', '{"']
MARKS = ["<|end|>", "<|call|>"]


def vocabulary() -> Guides:
    """Every byte, some pieces, two marks, and a token beyond the tokenizer's."""
    tokens = [*(bytes([byte]) for byte in range(256)), *(piece.encode() for piece in PIECES)]
    marks = range(len(tokens), len(tokens) + len(MARKS))
    return Guides([*tokens, *(mark.encode() for mark in MARKS), b""], list(marks), drops_space=False)


@pytest.fixture(scope="module")
def bytes_and_pieces() -> Guides:
    return vocabulary()


def accepts(guide: CompiledGuide, text: str) -> bool:
    """Whether an answer may be this text, spelled in bytes."""
    matcher = guide.matcher()
    bits, may_end = matcher.push(())
    for byte in text.encode():
        if not bits[byte >> 3] >> (byte & 7) & 1:
            return False
        bits, may_end = matcher.push([byte])
    return may_end


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
    bytes_and_pieces: Guides, asked: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    guide = bytes_and_pieces.compiled(Guide(**asked))

    assert [text for text in good if not accepts(guide, text)] == []
    assert [text for text in bad if accepts(guide, text)] == []


def test_properties_come_in_the_order_of_the_schema(bytes_and_pieces: Guides) -> None:
    def ordered(*names: str) -> CompiledGuide:
        properties = {name: {"type": "null"} for name in names}
        schema = {"type": "object", "properties": properties, "required": [*names]}
        return bytes_and_pieces.compiled(Guide(json_schema=schema))

    assert accepts(ordered("b", "a"), '{"b":null,"a":null}')
    assert not accepts(ordered("b", "a"), '{"a":null,"b":null}')
    assert accepts(ordered("a", "b"), '{"a":null,"b":null}')


def test_a_character_is_spelled_one_way_so_that_no_pattern_and_no_name_is_passed_by(
    bytes_and_pieces: Guides,
) -> None:
    named = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "null"}}
    objects = bytes_and_pieces.compiled(Guide(json_schema={"type": "object", **named}))
    texts = bytes_and_pieces.compiled(Guide(json_schema={"type": "string", "pattern": "^[^a]$"}))

    assert accepts(objects, '{"a":1,"b":null}')
    assert not accepts(objects, '{"\\u0061":null}')
    assert not accepts(objects, '{"a":1,"a":null}')
    assert accepts(texts, '"é"')
    assert not accepts(texts, '"\\u0061"')


def test_so_many_properties_as_cannot_be_had_twice_are_kept(bytes_and_pieces: Guides) -> None:
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


def test_a_schema_does_not_choose_how_strictly_it_is_kept(bytes_and_pieces: Guides) -> None:
    lenient = {"type": "integer", "x-guidance": {"lenient": True, "whitespace_pattern": "x"}}

    assert not accepts(bytes_and_pieces.compiled(Guide(json_schema=lenient)), "1x")
    with pytest.raises(InvalidGuideError, match=r'json_schema: .*Unimplemented keys: \["not"\]'):
        bytes_and_pieces.check(Guide(json_schema={**lenient, "not": {"const": 1}}))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"json_schema": {"type": "nonsense"}}, "json_schema: this cannot be kept: Invalid type: nonsense"),
        ({"json_schema": {"uniqueItems": True, "type": "array"}}, r'Unimplemented keys: \["uniqueItems"\]'),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 4}}, "Unsatisfiable schema"),
        ({"json_schema": False}, "schema is false"),
        ({"json_schema": {"type": "object", "minProperties": 2}}, "name the properties in required"),
        (
            {"json_schema": {"items": {"properties": {"const": {"required": ["a"], "minProperties": 3}}}}},
            "minProperties 3",
        ),
        ({"json_schema": {"$ref": "http://example.com/s.json"}}, "json_schema: this cannot be kept"),
        ({"json_schema": {"$ref": "#/$defs/a"}}, "Pointer '/\\$defs/a' does not exist"),
        ({"json_schema": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "no text can be"),
        ({"regex": "["}, "regex: this cannot be kept: .*unclosed character class$"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"\bword\b"}, "lookarounds not supported"),
        ({"grammar": "start: x"}, 'grammar: this cannot be kept: .*unknown name: "x"'),
        ({"grammar": "%%% (("}, "grammar: this cannot be kept: 1"),
        ({"grammar": 'rule: "a"'}, "no start rule found"),
        ({"grammar": 'start: start "a"'}, "no text can be what it asks for"),
        ({"grammar": "start: <|nobody|>"}, "grammar: this cannot be kept"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_with_a_reason(
    bytes_and_pieces: Guides, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidGuideError, match=said) as refused:
        bytes_and_pieces.check(Guide(**asked))

    assert (refused.value.code, refused.value.status) == ("invalid_guide", 400)
    assert len(refused.value.message) < 500
    assert "start: @guide" not in refused.value.message


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "hours of comparing": (
        {"json_schema": {"type": "object", "patternProperties": {f"^a{n}b$": {} for n in range(800)}}},
        "more than 3 s",
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
        "row has",
    ),
    "too many states": ({"regex": "a?" * 2000 + "a" * 2000}, "regex: this cannot be kept: lexer error"),
}  # fmt: skip


@pytest.mark.parametrize(("asked", "said"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_guide_is_refused_in_bounded_time(
    bytes_and_pieces: Guides, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidGuideError, match=said):
        bytes_and_pieces.check(Guide(**asked))


def test_large_guides_that_mean_no_harm_are_taken(bytes_and_pieces: Guides) -> None:
    properties = {f"p{n}": {"type": ("string", "number")[n % 2]} for n in range(300)}
    bytes_and_pieces.check(Guide(json_schema={"type": "object", "properties": properties}))
    bytes_and_pieces.check(Guide(json_schema={"enum": [f"value {n} of many" for n in range(2000)]}))
    bytes_and_pieces.check(Guide(choice=[f"choice number {n}" for n in range(1024)]))


# ---- following -----------------------------------------------------------------------------------


def test_tokens_are_followed_the_same_in_whatever_pieces(bytes_and_pieces: Guides) -> None:
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


def test_marks_are_no_text_and_come_where_a_grammar_names_them(bytes_and_pieces: Guides) -> None:
    call = 256 + len(PIECES) + 1
    anything = bytes_and_pieces.compiled(Guide(regex="(.|\n)*"))
    named = bytes_and_pieces.compiled(Guide(grammar='start: <|call|> "(" /[a-z]+/ ")"'))

    assert np.unpackbits(anything.matcher().push(()).bits, bitorder="little")[call - 1 :].sum() == 0
    matcher = named.matcher()
    assert np.unpackbits(matcher.push(()).bits, bitorder="little").nonzero()[0].tolist() == [call]
    assert np.unpackbits(matcher.push([call]).bits, bitorder="little").nonzero()[0].tolist() == [ord("(")]


def limited(monkeypatch: pytest.MonkeyPatch, states: int) -> Guides:
    limits = LLParserLimits(max_lexer_states=states, verbose_errors=False)
    monkeypatch.setattr(guide_trial, "limits", lambda: limits)
    return vocabulary()


def test_what_others_have_used_up_is_not_missed(
    bytes_and_pieces: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All who follow a grammar share its states, and their limit; alone each has enough of them."""
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


def test_a_guide_that_is_too_much_even_alone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = limited(monkeypatch, 50).compiled(Guide(regex="[a-z]{1,400}")).matcher()

    with pytest.raises(InvalidGuideError, match="regex: this cannot be kept: lexer error: too many states"):
        matcher.push([97] * 300)


def test_a_token_that_is_not_allowed_is_nobody_elses_fault(bytes_and_pieces: Guides) -> None:
    guide = bytes_and_pieces.compiled(Guide(regex="abc"))

    with pytest.raises(BugError, match="does not allow the token 120"):
        guide.matcher().push(list(b"abx"))

    assert accepts(guide, "abc")


# ---- kept ----------------------------------------------------------------------------------------


def test_a_guide_is_tried_and_compiled_once_while_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    guides = vocabulary()
    tried: list[Guide] = []
    monkeypatch.setattr(guides, "_try", tried.append)
    monkeypatch.setattr(module, "_KEPT", 2)
    first, second, third = (Guide(regex=text) for text in "abc")

    for asked in (first, first, second, first, third, first, second):
        guides.check(asked)

    assert tried == [first, second, third, second]
    assert guides.compiled(first) is guides.compiled(Guide(regex="a"))


def test_what_is_checked_is_what_is_followed(bytes_and_pieces: Guides) -> None:
    asked = Guide(json_schema={"const": "kept"})
    bytes_and_pieces.check(asked)

    assert accepts(bytes_and_pieces.compiled(asked), '"kept"')


# ---- tokenizers ----------------------------------------------------------------------------------


def guides_of(tokenizer: Tokenizer) -> tuple[Guides, Spelling]:
    decoders = TextDecoders(tokenizer)
    spelling = decoders.spelling(tokenizer.get_vocab_size())
    assert spelling is not None
    return Guides(spelling.tokens, sorted(decoders.marks), drops_space=spelling.drops_space), spelling


@pytest.mark.parametrize("kind", [checkpoints.byte_level, checkpoints.sentence_piece])
def test_whatever_spells_a_text_its_decoder_says_just_that(kind: Any) -> None:
    """Llama 2's decoder drops a space in front: what is allowed has one more."""
    tokenizer = kind()
    guides, _ = guides_of(tokenizer)
    texts = [" two", "two", "naïve café", '{"a":  1}', "<tool→call>", "\n x"]
    guide, decoders = guides.compiled(Guide(choice=texts)), TextDecoders(tokenizer)
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


def test_a_tokenizer_whose_texts_are_not_its_tokens_in_a_row_has_no_spelling() -> None:
    tokenizer = checkpoints.word_piece()

    assert TextDecoders(tokenizer).spelling(tokenizer.get_vocab_size()) is None
