"""Graph of Qwen3.5 with images and videos (`models.vision_language.graph`)."""

from typing import Final

from models.base import ModelGraph
from models.vision_language.frame_options import FrameOptions
from models.vision_language.graph import vision_language_graph

GRAPH: Final[ModelGraph] = vision_language_graph(
    "qwen3_5",
    {"Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"},
    serves="Qwen3.5: the architectures Qwen3_5ForConditionalGeneration and Qwen3_5Moe...",
    repository="Qwen/Qwen3.5-4B",
    modalities=("text", "image", "video"),
    options=FrameOptions,
)
