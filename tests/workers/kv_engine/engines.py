"""Construction of engines for tests."""

from dataclasses import fields
from typing import Any

from workers.kv_engine.config import KVEngineConfig
from workers.kv_engine.engine import KVEngine

_SETTINGS = {field.name for field in fields(KVEngineConfig)}


def make_engine(node: Any, **options: Any) -> KVEngine:
    """Make an engine; the options are the settings of `KVEngineConfig`, and other arguments of `KVEngine`."""
    settings = {name: value for name, value in options.items() if name in _SETTINGS}
    others = {name: value for name, value in options.items() if name not in _SETTINGS}
    return KVEngine(node, KVEngineConfig(**settings), **others)
