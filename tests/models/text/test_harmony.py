"""gpt-oss's answers: channels, calls, and what has no header."""

import pytest

from models.text.harmony import HarmonyParser

THOUGHT = "<|channel|>analysis<|message|>Let me see.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'


def parted(text: str) -> tuple[str, str]:
    """The reasoning and the content, which do not depend on how the text is cut."""

    def read(pieces: list[str]) -> tuple[str, str]:
        parser = HarmonyParser()
        parts = [*map(parser.push, pieces), parser.end()]
        return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)

    whole = read([text])
    assert read(list(text)) == whole
    return whole


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{THOUGHT}{NEXT}{FINAL}It rains.\n", "Let me see.", "It rains.\n"),
        (f"{THOUGHT}{NEXT}{FINAL}It rains.<|return|>", "Let me see.", "It rains."),
        (f"{FINAL}It rains.", "", "It rains."),
        (f"{THOUGHT}{NEXT}{CALL}", "Let me see.", CALL),
        (f"{THOUGHT}{NEXT}{CALL}<|call|>", "Let me see.", CALL),
        (f'{NEXT} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}', "", CALL),
        (' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 1}', "", CALL),
        ('<|channel|>analysis to=functions.f code<|message|>{"a": 1}', "", CALL),
        (f"<|channel|>commentary<|message|>I will look.<|end|>{NEXT}{CALL}", "", f"I will look.{CALL}"),
        (f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{FINAL}a", "Let me see.\n\nLet me see.", "a"),
        (f"<|channel|>commentary<|message|>a<|end|>{NEXT}{FINAL}b", "", "a\n\nb"),
        ("<|channel|>analysis<|message|>Let me", "Let me", ""),
        ("<|channel|>analysis<|message|>a<|en", "a<|en", ""),
        ("<|channel|>anal", "", ""),
        (f"{THOUGHT}{NEXT}", "Let me see.", ""),
        ("It rains.", "", "It rains."),
        ('{"a": 1}', "", '{"a": 1}'),
        ("<b>", "", "<b>"),
        ("", "", ""),
    ],
)
def test_an_answer_is_parted(text: str, reasoning: str, content: str) -> None:
    assert parted(text) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "is_inside", "has_reasoned", "has_ended"),
    [
        ("<|channel|>", False, False, False),
        ("<|channel|>analysis<|message|>a", True, True, False),
        (f"{THOUGHT}{NEXT}", False, True, False),
        (f"{THOUGHT}{NEXT}{FINAL}", False, True, True),
        (CALL, False, False, True),
        ("It rains.", False, False, True),
    ],
)
def test_the_parser_knows_where_it_is(
    text: str, is_inside: bool, has_reasoned: bool, has_ended: bool
) -> None:
    parser = HarmonyParser()
    parser.push(text)

    assert (parser.is_inside, parser.has_reasoned, parser.has_ended) == (is_inside, has_reasoned, has_ended)


def test_text_is_passed_on_as_it_arrives() -> None:
    parser = HarmonyParser()

    assert parser.push("<|channel|>analysis<|message|>Let").reasoning == "Let"
    assert parser.push(f" me<|end|>{NEXT}{FINAL}It").content == "It"
    assert parser.push(" rains <").content == " rains "
    assert parser.push("3").content == "<3"
