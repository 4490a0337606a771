"""Walks: one request's way through a part of a model, as a dataflow graph.

    language    what a walk is written in: nodes, edges, sections, loops
    compiler    finds what is wrong with one, once, when its model is loaded
    compiled    what is left to know of a right one: immutable, shared by all its runs
    run         one request on its way through one: a state machine without I/O

All of it is pure, and knows no values, no models and no ranks. `docs/walks.md` shows it by example.
"""

from shared.walks.compiled import CompiledLoop, CompiledNode, CompiledWalk, Pair
from shared.walks.compiler import compile_walk
from shared.walks.language import (
    CLIENT,
    KEEP,
    Client,
    Destination,
    Edge,
    Keep,
    Loop,
    Node,
    Parallel,
    Section,
    Sequential,
    WalkError,
)
from shared.walks.run import Emission, Firing, WalkRun

__all__ = [
    "CLIENT",
    "KEEP",
    "Client",
    "CompiledLoop",
    "CompiledNode",
    "CompiledWalk",
    "Destination",
    "Edge",
    "Emission",
    "Firing",
    "Keep",
    "Loop",
    "Node",
    "Pair",
    "Parallel",
    "Section",
    "Sequential",
    "WalkError",
    "WalkRun",
    "compile_walk",
]
