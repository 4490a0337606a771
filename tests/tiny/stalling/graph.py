"""The pure face: that of Orpheus."""

from dataclasses import replace
from typing import Final

from models.base import ModelGraph
from models.orpheus import graph

GRAPH: Final[ModelGraph] = replace(graph.GRAPH, family="stalling", repository="", claims=None)
