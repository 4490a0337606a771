"""Graph of Idefics3 (`models.vision_language.graph`)."""

from typing import Final

from models.base import ModelGraph
from models.vision_language.graph import vision_language_graph

GRAPH: Final[ModelGraph] = vision_language_graph(
    "idefics3",
    {"Idefics3ForConditionalGeneration"},
    serves="Idefics3: the architecture Idefics3ForConditionalGeneration",
    repository="HuggingFaceM4/Idefics3-8B-Llama3",
    max_positions=2048,
)
