"""Guided texts: random walks through the grammar of a schema, and validation by the library `jsonschema`."""

import json
from decimal import Decimal
from random import Random
from typing import Any, Final

import jsonschema

from models.text.guides import CompiledGuide, GuideCompiler
from shared.events import Guide

_WEIGHTS: Final = {ord(char): weight for char, weight in {'"': 12.0, ",": 3, "}": 6, "]": 6, "\\": 3}.items()}
"""Bytes that end something are likelier than others: texts stay short."""
_MOST_BYTES: Final = 300
_ENDS: Final = 0.4


def byte_compiler() -> GuideCompiler:
    """A compiler for a vocabulary of all bytes."""
    return GuideCompiler([bytes([byte]) for byte in range(256)], [], drops_space=False)


def compiled(compiler: GuideCompiler, schema: Any) -> CompiledGuide:
    return compiler.compiled(Guide(json_schema=schema))


def accepts(guide: CompiledGuide, text: str) -> bool:
    """True if an answer may be this text, spelled in bytes."""
    matcher = guide.matcher()
    bits, may_end = matcher.push(())
    for byte in text.encode():
        if not bits[byte >> 3] >> (byte & 7) & 1:
            return False
        bits, may_end = matcher.push([byte])
    return may_end


def random_text(guide: CompiledGuide, random: Random) -> str | None:
    """A text that the guide allows; None if it did not end in time."""
    matcher, text = guide.matcher(), bytearray()
    bits, may_end = matcher.push(())
    while len(text) < _MOST_BYTES:
        allowed = [byte for byte in range(256) if bits[byte >> 3] >> (byte & 7) & 1]
        if not allowed or (may_end and random.random() < _ENDS):
            break
        weights = [_WEIGHTS.get(byte, 1 if byte > ord(" ") else 0.3) for byte in allowed]
        text += bytes([random.choices(allowed, weights)[0]])
        bits, may_end = matcher.push(text[-1:])
    return text.decode() if may_end else None


def fault_of(schema: dict[str, Any], text: str) -> str:
    """The reason why a text is not valid by a schema; empty if it is."""
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    checker = validator.FORMAT_CHECKER
    error = next(validator(schema, format_checker=checker).iter_errors(json.loads(text)), None)
    return "" if error is None else error.message


def is_multiple(text: str, of: str) -> bool:
    """True if a number is a multiple of another one, as decimals."""
    return Decimal(text) % Decimal(of) == 0
