"""Graph of Mistral 3 (`models.vision_language.graph`)."""

from typing import Final

from models.base import ModelGraph
from models.vision_language.graph import vision_language_graph

GRAPH: Final[ModelGraph] = vision_language_graph(
    "mistral3",
    {"Mistral3ForConditionalGeneration"},
    serves="Mistral Small 3.1 and later: the architecture Mistral3ForConditionalGeneration",
    repository="mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    max_positions=131_072,
)
