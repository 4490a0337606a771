"""Graph of Qwen3-VL (`models.vision_language.graph`)."""

from typing import Final

from models.base import ModelGraph
from models.vision_language.frame_options import FrameOptions
from models.vision_language.graph import vision_language_graph

GRAPH: Final[ModelGraph] = vision_language_graph(
    "qwen3_vl",
    {"Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"},
    serves="Qwen3-VL: the architectures Qwen3VLForConditionalGeneration and Qwen3VLMoe...",
    repository="Qwen/Qwen3-VL-4B-Instruct",
    modalities=("text", "image", "video"),
    options=FrameOptions,
)
