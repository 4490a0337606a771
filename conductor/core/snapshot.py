"""A cluster as bytes, and back: what a fold came to, so that the next one need not begin at the log's start.

    pieces(cluster)  ──bytes, bytes, ...──>  load  ──>  a cluster that goes on behind `cluster.seq`

Pure. It knows no file and no log: whose state it is, and whether it may be used, is for
`conductor.snapshots` to say. Every field of `Cluster` is kept, as its type says; those that are not are
named in `CACHES`, and made anew.

What the maps of a cluster hold is data that no fold changes in place. So `pieces` takes hold of all of it
at once, and turns it into bytes piece by piece, while the cluster goes on.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from itertools import islice
from typing import Any, Final, get_args, get_origin, get_type_hints

import msgspec

from conductor.core.cluster import Cluster
from conductor.core.request import Request
from models.base import ModelGraph
from shared.subjects import Subjects

CACHES: Final = frozenset({"graph_of", "subjects", "memory", "_reactor"})
"""Fields of `Cluster` that are no state: how it reads, plans, which run again from what is recorded, and what
makes the choice of replicas a little better."""

_HOMES: Final = frozenset({"open", "ended"})
"""Where requests are. Other maps of requests are choices from `open`, and kept as ids."""
_REQUESTS_AT_ONCE: Final = 32
_ENTRIES_AT_ONCE: Final = 500
_LENGTH: Final = struct.Struct("<I")
_ENCODER: Final = msgspec.msgpack.Encoder()


class SnapshotError(ValueError):
    """Bytes that are not the state of a cluster of this version; says what was expected and found."""


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    """One field of a cluster; of one that is a map, some of its entries."""

    field: str
    content: msgspec.Raw


def dump(cluster: Cluster) -> bytes:
    """All of a cluster's state."""
    return b"".join(pieces(cluster))


def pieces(cluster: Cluster) -> Iterator[bytes]:
    """The same in pieces, each quickly made; the state is that of the call, not of their making."""
    held = [(name, _held(name, kind, getattr(cluster, name))) for name, kind in _kept().items()]
    return (_packed(name, content) for name, contents in held for content in contents)


def load(data: bytes | memoryview, graph_of: Callable[[str], ModelGraph], subjects: Subjects) -> Cluster:
    """The cluster whose state `data` is; it folds on behind its `seq`.

    Raises:
        SnapshotError: `data` is not all of a state of this version.
    """
    kept = _kept()
    found: dict[str, Any] = {}
    try:
        for piece in _parsed(data):
            kind = kept[piece.field]
            content = msgspec.msgpack.decode(piece.content, type=_written_as(piece.field, kind))
            if _is_map(kind) and piece.field in found:
                found[piece.field] |= content
            else:
                found[piece.field] = content
        cluster = Cluster(graph_of, subjects)
        for name, kind in kept.items():
            setattr(cluster, name, _restored(name, kind, found))
    except KeyError as error:
        raise SnapshotError(f"expected the fields {sorted(kept)} of a cluster; {error} is amiss") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise SnapshotError(f"expected the fields of a cluster: {error}") from error
    return cluster


@cache
def _kept() -> dict[str, Any]:
    """The fields that are kept, and their types."""
    types = get_type_hints(Cluster)
    return {field.name: types[field.name] for field in fields(Cluster) if field.name not in CACHES}


def _is_map(kind: Any) -> bool:
    return get_origin(kind) in (dict, OrderedDict)


def _is_choice(name: str, kind: Any) -> bool:
    return name not in _HOMES and _is_map(kind) and get_args(kind)[1] is Request


# ---- writing -------------------------------------------------------------------------------------
def _held(name: str, kind: Any, value: Any) -> Iterator[Any]:
    """What a field holds now, in parts; none of them changes when the field does."""
    if _is_choice(name, kind):
        return iter([list(value)])
    if _is_map(kind):
        entries = zip(list(value), list(value.values()), strict=True)  # without a tuple for each
        return _parts(entries, _REQUESTS_AT_ONCE if name in _HOMES else _ENTRIES_AT_ONCE)
    return iter([msgspec.Raw(_ENCODER.encode(value))])


def _parts(entries: Iterator[tuple[Any, Any]], at_once: int) -> Iterator[dict[Any, Any]]:
    """The entries, so many at a time; one part without any where there are none."""
    part = dict(islice(entries, at_once))
    while True:
        yield part
        if not (part := dict(islice(entries, at_once))):
            return


def _packed(name: str, content: Any) -> bytes:
    packed = _ENCODER.encode((name, content))
    return _LENGTH.pack(len(packed)) + packed


# ---- reading -------------------------------------------------------------------------------------
def _parsed(data: bytes | memoryview) -> Iterator[_Piece]:
    position = 0
    while position < len(data):
        begin = position + _LENGTH.size
        if begin > len(data):
            raise SnapshotError("the last piece has no length")
        position = begin + _LENGTH.unpack_from(data, position)[0]
        if position > len(data):
            raise SnapshotError(f"a piece ends at byte {position}, the state at {len(data)}")
        yield msgspec.msgpack.decode(memoryview(data)[begin:position], type=_Piece)


def _written_as(name: str, kind: Any) -> Any:
    if _is_choice(name, kind):
        return list[str]
    return dict[get_args(kind)] if _is_map(kind) else kind  # type: ignore[misc]  # a type made of types


def _restored(name: str, kind: Any, found: dict[str, Any]) -> Any:
    """A field as the cluster has it, from what was written of all of them."""
    if _is_choice(name, kind):
        return {request_id: found["open"][request_id] for request_id in found[name]}
    origin = get_origin(kind)
    return origin(found[name]) if origin is OrderedDict else found[name]
