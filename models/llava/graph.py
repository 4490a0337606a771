"""Graph of LLaVA (`models.vision_language.graph`)."""

from typing import Final

from models.base import ModelGraph
from models.vision_language.graph import vision_language_graph

GRAPH: Final[ModelGraph] = vision_language_graph(
    "llava",
    {"LlavaForConditionalGeneration"},
    serves="LLaVA and Pixtral: the architecture LlavaForConditionalGeneration",
    repository="llava-hf/llava-1.5-7b-hf",
    max_positions=2048,
)
