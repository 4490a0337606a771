"""Graph of PaliGemma (`models.vision_language.graph`)."""

from typing import Final

from models.base import ModelGraph
from models.vision_language.graph import vision_language_graph

GRAPH: Final[ModelGraph] = vision_language_graph(
    "paligemma",
    {"PaliGemmaForConditionalGeneration"},
    serves="PaliGemma and PaliGemma 2: the architecture PaliGemmaForConditionalGeneration",
    repository="google/paligemma2-3b-mix-224",
)
