"""Walks: dataflow graphs of parts of a model.

    language    the elements of a walk: nodes, edges, sections, loops, streams
    chunks      the division of a stream's items into chunks for the consuming node
    checkpoints the values with which a later attempt begins a loop
    compiler    the check and resolution of a walk, once, when its model is loaded
    compiled    a compiled walk: immutable, and shared by all its runs
    run         the execution of a walk for one request: a state machine without I/O, equal on every rank
    linker      the streams between the walks of a model

The package is pure, and independent of values, models and ranks. `docs/walks.md` explains it by example.
"""

import warnings
from typing import TYPE_CHECKING, Any, Final

from shared.walks.chunks import (
    AfterEnd,
    ChunkPolicy,
    Cutter,
    Fixed,
    LeftContext,
    SlidingWindow,
    StreamChunk,
    chunks_of,
    policy_of,
    possible_policies,
    takes_arguments,
)
from shared.walks.compiled import (
    UNLIMITED,
    CompiledLoop,
    CompiledNode,
    CompiledWalk,
    InputPort,
    LoopCheckpoint,
)
from shared.walks.compiler import compile_walk
from shared.walks.errors import WalkError
from shared.walks.language import (
    CLIENT,
    KEEP,
    Destination,
    Edge,
    Guard,
    Keep,
    Loop,
    Node,
    Parallel,
    Section,
    Sequential,
    StreamingEdge,
    StreamInput,
    ToClient,
)
from shared.walks.linker import StreamLink, link_streams
from shared.walks.run import NOT_DUE, Emission, Firing, NotDue, Value, WalkRun

__all__ = [
    "CLIENT",
    "KEEP",
    "NOT_DUE",
    "UNLIMITED",
    "AfterEnd",
    "ChunkPolicy",
    "CompiledLoop",
    "CompiledNode",
    "CompiledWalk",
    "Cutter",
    "Destination",
    "Edge",
    "Emission",
    "Firing",
    "Fixed",
    "Guard",
    "InputPort",
    "Keep",
    "LeftContext",
    "Loop",
    "LoopCheckpoint",
    "Node",
    "NotDue",
    "Parallel",
    "Section",
    "Sequential",
    "SlidingWindow",
    "StreamChunk",
    "StreamInput",
    "StreamLink",
    "StreamingEdge",
    "ToClient",
    "Value",
    "WalkError",
    "WalkRun",
    "chunks_of",
    "compile_walk",
    "link_streams",
    "policy_of",
    "possible_policies",
    "takes_arguments",
]

RENAMED: Final = {
    "Chunk": "StreamChunk",
    "Client": "ToClient",
    "EARLY": "NOT_DUE",
    "Early": "NotDue",
    "Pair": "InputPort",
    "Stream": "StreamInput",
    "StreamInfo": "StreamLink",
    "streams": "link_streams",
}
"""The current names by the old ones, which are accepted with a warning for one version."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in RENAMED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        new = RENAMED[name]
        warnings.warn(f"{__name__}.{name} is now called {new}", DeprecationWarning, stacklevel=2)
        return globals()[new]
