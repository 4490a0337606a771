"""The pure face: that of any decoder-only language model."""

from typing import Final

from models.base import ModelGraph
from models.decoder_lm import graph

GRAPH: Final = ModelGraph(
    family="poisonous", nodes=graph.GRAPH.nodes, walks=graph.GRAPH.walks, plan=graph.GRAPH.plan
)
