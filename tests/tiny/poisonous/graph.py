"""The pure face: that of any decoder-only language model."""

from typing import Final

from shared.models.base import ModelGraph
from shared.models.decoder_lm import graph

GRAPH: Final = ModelGraph(
    family="poisonous", nodes=graph.GRAPH.nodes, walks=graph.GRAPH.walks, plan=graph.GRAPH.plan
)
