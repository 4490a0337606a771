"""Cost of guided answers in tokens per second, compared with unguided ones.

The same prompts and numbers of tokens in turns: unguided; guided by a JSON schema of records; guided by a
regular expression that is hard for llguidance (counted letters: one state per count). No guide ends before
the last token. Then the time of a mask alone, over a vocabulary of published size.
"""

import time
from collections import Counter
from collections.abc import Iterator
from random import Random
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.random_model import VOCABULARY, engine, node, prompt
from benchmarks.report import RATIO, Figure, spread
from models.text.guides import CompiledGuide, GuideCompiler
from shared.events import Guide
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.sequence_spec import Sampling, SequenceSpec

ROWS: Final = (1, 8, 32)
TOKENS: Final = 64
ROUNDS: Final = 3
LARGE: Final = 150_000
_POOL: Final = 16 * 1024
_RECORD: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["function", "method", "class"]},
        "line": {"type": "integer", "minimum": 1},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
    },
    "required": ["name", "kind", "line", "tags"],
    "additionalProperties": False,
}
GUIDES: Final = {
    "JSON schema": Guide(json_schema={"type": "array", "items": _RECORD, "minItems": 10_000}),
    "regular expression": Guide(regex="[a-z]{20,40}( [a-z]{20,40}){200}"),
}


def measure() -> list[Figure]:
    model, guides = node(), GuideCompiler(_vocabulary(VOCABULARY), [], drops_space=False)
    ways: dict[str, CompiledGuide | None] = {"free": None}
    ways |= {name: guides.compiled(guide) for name, guide in GUIDES.items()}
    figures: list[Figure] = []
    for rows in ROWS:
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(ROUNDS):
            for way, guide in ways.items():
                rates[way].append(_rate(engine(model, tokens=_POOL), rows, number, guide))
        for way in GUIDES:
            ratios = [one / free for one, free in zip(rates[way], rates["free"], strict=True)]
            figures.append(spread(f"{rows} sequences, {way} / unguided", ratios, RATIO))
        figures += [spread(f"{rows} sequences, {way}", found, "tok/s") for way, found in rates.items()]
    return [*figures, *_masks()]


def _rate(served: KVEngine, rows: int, number: int, guide: CompiledGuide | None) -> float:
    for row in range(rows):
        served.add(
            SequenceSpec(
                key=str(row),
                prompt_ids=prompt(1000 * number + row, 32),
                max_tokens=TOKENS,
                ignore_eos=True,
                guide=guide,
                sampling=Sampling(temperature=1.0, seed=1000 * number + row),
            )
        )
    begun: Counter[str] = Counter()
    while len(begun) < rows:
        begun.update(output.key for output in served.step())
    begun_s, made = time.perf_counter(), 0
    while served.has_work:
        made += len(served.step())
    took_s = time.perf_counter() - begun_s
    assert made + begun.total() == rows * TOKENS, "expected no guide to end before the last token"
    return made / took_s


def _masks() -> list[Figure]:
    """Measure the time of a mask and of the compilation of a guide, with no engine running."""
    guides = GuideCompiler(_vocabulary(LARGE), [], drops_space=False)
    figures: list[Figure] = []
    for way, asked in GUIDES.items():
        begun_s = time.perf_counter()
        guide = guides.compiled(asked)
        compiled_s = time.perf_counter() - begun_s
        took_s = [took for seed in range(ROUNDS) for took in _walk(guide, seed)]
        figures += [
            Figure(f"compiling a {way}, {LARGE:,} tokens", 1e3 * compiled_s, "ms"),
            Figure(f"a mask of a {way}, {LARGE:,} tokens", 1e6 * median(took_s), "us", _tail(took_s)),
        ]
    return figures


def _walk(guide: CompiledGuide, seed: int) -> Iterator[float]:
    """Yield the seconds of each mask along an answer that is drawn from the allowed tokens."""
    matcher, random = guide.matcher(), np.random.default_rng(seed)
    last: list[int] = []
    for _ in range(TOKENS):
        begun_s = time.perf_counter()
        allowed = matcher.push(last)
        yield time.perf_counter() - begun_s
        last = [int(random.choice(np.unpackbits(allowed.bits, bitorder="little").nonzero()[0]))]


def _tail(took_s: list[float]) -> str:
    return f"mean {1e6 * sum(took_s) / len(took_s):,.0f}, p99 {1e6 * float(np.quantile(took_s, 0.99)):,.0f}"


def _vocabulary(size: int) -> list[bytes]:
    """Make tokens like those of a byte-level tokenizer: bytes, numbers, punctuation, words of syllables."""
    random, found = Random(0), dict.fromkeys(bytes([byte]) for byte in range(256))
    pieces: list[Any] = [
        '":',
        '",',
        '"}',
        '{"',
        "[]",
        "],",
        " {",
        " [",
        ": ",
        ", ",
        "  ",
        "\n\n",
        "\n    ",
        "();",
    ]
    found |= dict.fromkeys(piece.encode() for piece in pieces)
    found |= dict.fromkeys(str(number).encode() for number in range(1000))
    syllables = [a + b + c for a in "bcdfghklmnprstvw" for b in "aeiou" for c in ("", "l", "n", "r", "st")]
    while len(found) < size:
        word = "".join(random.choices(syllables, k=random.choice((1, 2, 2, 3, 4))))
        form = random.choice((" {}", " {}", "{}", "{}", "{}_", " _{}", "{}é"))
        found[form.format(random.choice((word, word, word.capitalize(), word.upper()))).encode()] = None
    return list(found)
