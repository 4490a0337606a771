"""Walks: one request's way through a part of a model, as a dataflow graph.

    language    what a walk is written in: nodes, edges, sections, loops, streams
    chunks      how a stream's items are cut for the node that takes them
    compiler    finds what is wrong with one, once, when its model is loaded
    compiled    what is left to know of a right one: immutable, shared by all its runs
    run         one request on its way through one: a state machine without I/O, alike on every rank
    streams     which walks of a model stream into which

All of it is pure, and knows no values, no models and no ranks. `docs/walks.md` shows it by example.
"""

from shared.walks.chunks import (
    AfterEnd,
    ChunkPolicy,
    Cutter,
    Fixed,
    LeftContext,
    SlidingWindow,
    StreamChunk,
    chunks_of,
)
from shared.walks.compiled import UNLIMITED, CompiledLoop, CompiledNode, CompiledWalk, InputPort
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
]
