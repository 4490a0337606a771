"""Collection of the corpus: Python names, and the first sentences of their docstrings.

The result is stored in `docstrings.json` next to this file, because docstrings change between versions of
Python and the demo model must not. Run it only to renew the corpus, with the intended version of Python:

    python3.13 -m configs.demo.collect > configs/demo/docstrings.json

No sentence is written by hand: a docstring without a clean first sentence is left out. The module needs only
the standard library and is independent of questions, tokens and models.
"""

import builtins
import importlib
import inspect
import json
import platform
import re
import sys
from collections.abc import Iterator
from types import ModuleType

BUILTIN_TYPES = (str, list, dict, set, tuple, int, float, bytes, frozenset, complex, range, slice)

# Modules without access to files, processes or a network.
MODULES = (
    "base64", "bisect", "collections", "contextlib", "copy", "dataclasses", "datetime", "fractions",
    "functools", "hashlib", "heapq", "html", "itertools", "json", "keyword", "math", "operator", "os.path",
    "random", "re", "statistics", "string", "struct", "textwrap", "time",
)  # fmt: skip

# Classes of those modules whose methods are included.
CLASSES = (
    "collections.Counter",
    "collections.deque",
    "datetime.date",
    "datetime.datetime",
    "re.Match",
    "re.Pattern",
)

SHORTEST, LONGEST = 12, 195
SIGNATURE = re.compile(r"^[A-Za-z_][\w.]*\(.*\)(?:\s*-{1,2}>\s*(?P<gives>.*))?$")
ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|a\.k\.a|etc|vs|cf)\.$")


def first_sentence(doc: str) -> str | None:
    """Return the first sentence of prose in `doc`, the description in a lone signature line, or None."""
    text = inspect.cleandoc(doc)
    if not text:
        return None
    paragraphs = [paragraph.splitlines() for paragraph in text.split("\n\n")]
    opening = paragraphs[0][0]
    signatures = [line for line in paragraphs[0] if SIGNATURE.match(line)]
    if not signatures:
        return _clean(_sentence(paragraphs[0]), capital=False)
    gives = _described(opening) if len(signatures) == 1 else None
    prose = paragraphs[0][len(signatures) :] or (paragraphs[1] if len(paragraphs) > 1 else [])
    return gives or _clean(_sentence(prose)) or (opening if _is_plain(opening) else None)


def _described(signature: str) -> str | None:
    """Return the description in a lone signature line: `D.pop(k[,d]) -> v, remove specified key and ...`."""
    match = SIGNATURE.match(signature)
    gives = (match and match["gives"]) or ""
    after_type = _clean(_sentence([re.sub(r"^\w+\.\s+", "", gives)]))
    if after_type is not None or len(gives.split()) < 3 or not _is_plain(signature):
        return after_type
    return signature


def _sentence(lines: list[str]) -> str:
    text = " ".join(" ".join(lines).split()).replace("``", "")
    ends = (text[: end.end()] for end in re.finditer(r"(?<!\.)\.(?=\s|$)", text))
    return next((sentence for sentence in ends if not ABBREVIATION.search(sentence)), text)


def _clean(sentence: str, *, capital: bool = True) -> str | None:
    begun = sentence[:1].isupper() if capital else sentence[:1].isalpha()
    prose = begun and (sentence[-1] in ".)" or sentence[-1].isalnum()) and " " in sentence
    return (
        sentence
        if prose and ">>>" not in sentence and "<==>" not in sentence and _is_plain(sentence)
        else None
    )


def _is_plain(sentence: str) -> bool:
    balanced = sentence.count("(") == sentence.count(")") and sentence.count('"') % 2 == 0
    return balanced and sentence.isascii() and SHORTEST <= len(sentence) <= LONGEST and "`" not in sentence


def _members(owner: type | ModuleType) -> Iterator[tuple[str, object]]:
    """Yield the public members of `owner` by name, without those that it only imports."""
    exported = getattr(owner, "__all__", None) if isinstance(owner, ModuleType) else None
    for name in sorted(exported or vars(owner)):
        member = getattr(owner, name)
        if name.startswith("_") or not (callable(member) or inspect.isdatadescriptor(member)):
            continue
        home = getattr(member, "__module__", None) or owner.__name__
        if exported or owner is builtins or isinstance(owner, type) or home.lstrip("_") == owner.__name__:
            yield name, member


def _named() -> Iterator[tuple[str, object]]:
    yield from _members(builtins)
    for kind in BUILTIN_TYPES:
        yield from ((f"{kind.__name__}.{name}", member) for name, member in _members(kind))
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        yield module_name, module
        for name, member in _members(module):
            yield f"{module_name}.{name}", member
    for path in CLASSES:
        module_name, class_name = path.rsplit(".", 1)
        kind = getattr(importlib.import_module(module_name), class_name)
        yield from ((f"{class_name}.{name}", member) for name, member in _members(kind))


def collect() -> dict[str, str]:
    """Return all names with a clean first sentence, sorted, without methods that repeat `object`'s."""
    found: dict[str, str] = {}
    for name, member in _named():
        doc = member.__doc__
        sentence = (
            first_sentence(doc)
            if isinstance(doc, str) and (member is type or doc != type(member).__doc__)
            else None
        )
        if sentence is not None:
            found.setdefault(name, sentence)
    return dict(sorted(found.items()))


if __name__ == "__main__":
    corpus = {
        "source": f"first sentences of the docstrings of CPython {platform.python_version()}",
        "license": "PSF-2.0, see checkpoint/LICENSE-PSF.txt",
        "docstrings": collect(),
    }
    json.dump(corpus, sys.stdout, indent=1, ensure_ascii=True)
    sys.stdout.write("\n")
