"""Serialisation of a cluster's state, so that the next fold need not start at the beginning of the log.

    pieces(cluster)  ──bytes, bytes, ...──>  load  ──>  a cluster that continues after `cluster.seq`

Pure: it knows no file and no log. `conductor.snapshots` decides whether a snapshot may be used. All fields of
`Cluster` are kept with their types, except those in `CACHES`, which are rebuilt.

The maps of a cluster contain data that no fold changes in place. `pieces` therefore captures all of it at
once and serialises it piece by piece while the cluster continues.
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

CACHES: Final = frozenset({"graph_of", "subjects", "retention", "memory", "_reactor"})
"""Fields of `Cluster` that are not state: lookups, limits, running plans (rebuilt from records), and the
memory of the choice of replicas.
"""

_HOMES: Final = frozenset({"open", "ended"})
"""The maps that contain requests. Other maps of requests are subsets of `open` and are kept as ids."""
_REQUESTS_AT_ONCE: Final = 32
_ENTRIES_AT_ONCE: Final = 500
_LENGTH: Final = struct.Struct("<I")
_ENCODER: Final = msgspec.msgpack.Encoder()


class SnapshotError(ValueError):
    """Bytes that are not the state of a cluster of this version."""


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    """One field of a cluster; of a map, some of its entries."""

    field: str
    content: msgspec.Raw


def dump(cluster: Cluster) -> bytes:
    """Serialise the whole state."""
    return b"".join(pieces(cluster))


def pieces(cluster: Cluster) -> Iterator[bytes]:
    """Serialise the state as of the call, in small pieces that are quick to make."""
    held = [(name, _held(name, kind, getattr(cluster, name))) for name, kind in _kept().items()]
    return (_packed(name, content) for name, contents in held for content in contents)


def load(data: bytes | memoryview, graph_of: Callable[[str], ModelGraph], subjects: Subjects) -> Cluster:
    """Restore a cluster; it continues after its `seq`.

    Raises:
        SnapshotError: `data` is not a complete state of this version.
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
        raise SnapshotError(f"expected the fields {sorted(kept)} of a cluster; {error} is missing") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise SnapshotError(f"expected the fields of a cluster: {error}") from error
    return cluster


@cache
def _kept() -> dict[str, Any]:
    """The kept fields and their types."""
    types = get_type_hints(Cluster)
    return {field.name: types[field.name] for field in fields(Cluster) if field.name not in CACHES}


def _is_map(kind: Any) -> bool:
    return get_origin(kind) in (dict, OrderedDict)


def _is_choice(name: str, kind: Any) -> bool:
    return name not in _HOMES and _is_map(kind) and get_args(kind)[1] is Request


# ---- writing -------------------------------------------------------------------------------------
def _held(name: str, kind: Any, value: Any) -> Iterator[Any]:
    """The present content of a field, in parts that do not change when the field does."""
    if _is_choice(name, kind):
        return iter([list(value)])
    if _is_map(kind):
        entries = zip(list(value), list(value.values()), strict=True)  # without a tuple per entry
        return _parts(entries, _REQUESTS_AT_ONCE if name in _HOMES else _ENTRIES_AT_ONCE)
    return iter([msgspec.Raw(_ENCODER.encode(value))])


def _parts(entries: Iterator[tuple[Any, Any]], at_once: int) -> Iterator[dict[Any, Any]]:
    """Split entries into parts of `at_once`; one empty part if there are none."""
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
    """Restore a field from its parts."""
    if _is_choice(name, kind):
        return {request_id: found["open"][request_id] for request_id in found[name]}
    origin = get_origin(kind)
    return origin(found[name]) if origin is OrderedDict else found[name]
