"""Strategies for damage, drawn by hypothesis: to bytes, and to JSON values."""

import copy
import os
from typing import Any, Final

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES: Final = int(os.environ.get("FUZZ_EXAMPLES", "100"))

FUZZED: Final = settings(
    max_examples=EXAMPLES,
    derandomize="FUZZ_EXAMPLES" not in os.environ,  # a soak tries others each time
    suppress_health_check=list(HealthCheck),
)

NASTY: Final[list[Any]] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**40, 0.5, -0.5, 1e308, 1e-308),
    *("", " ", "\x00", "\ud800", "é" * 300, "🎼", "../../etc/passwd", "a.b.*.>", "${jndi:x}", "%s%n", "1"),
    *([], [[]], [None], [0] * 50, [[[[[[]]]]]], {}, {"": {}}, {"type": "object"}, {"a": [{"b": None}]}),
]


@st.composite
def damaged_bytes(draw: st.DrawFn, whole: bytes) -> bytes:
    """`whole` with one to four cuts, flips, insertions or duplications."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        end = min(len(data), at + draw(st.integers(1, 32)))
        match draw(st.sampled_from(("cut", "flip", "insert", "double", "end"))):
            case "cut":
                del data[at:end]
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=16))
            case "double":
                data[at:at] = data[at:end]
            case "end":
                del data[at:]
            case _:
                pass
    return bytes(data)


@st.composite
def damaged_value(draw: st.DrawFn, whole: Any) -> Any:
    """A copy of `whole` with one to three of its parts replaced, removed, renamed or wrapped."""
    value = {"root": copy.deepcopy(whole)}
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(value))
        parent, key = places[draw(st.integers(0, len(places) - 1))]
        match draw(st.sampled_from(("replace", "remove", "rename", "wrap", "many"))):
            case "replace":
                parent[key] = copy.deepcopy(draw(st.sampled_from(NASTY)))
            case "remove" if parent is not value:
                del parent[key]
            case "rename" if isinstance(parent, dict) and parent is not value:
                parent[draw(st.text(max_size=8))] = parent.pop(key)
            case "wrap":
                parent[key] = [parent[key]]
            case "many":
                parent[key] = [copy.deepcopy(parent[key])] * draw(st.integers(0, 40))
            case _:
                pass
    return value["root"]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every position inside `value` that can be replaced, as container and key."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    places: list[tuple[Any, Any]] = []
    for key in keys:
        places += [(value, key), *_places(value[key])]
    return places
