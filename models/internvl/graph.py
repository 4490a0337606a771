"""Graph of InternVL (`models.vision_language.graph`)."""

from typing import Final

from models.base import ModelGraph
from models.vision_language.graph import vision_language_graph

GRAPH: Final[ModelGraph] = vision_language_graph(
    "internvl",
    {"InternVLForConditionalGeneration"},
    serves="InternVL in transformers' own format: the architecture InternVLForConditionalGeneration",
    repository="OpenGVLab/InternVL3-1B-hf",
    max_positions=32_768,
)
