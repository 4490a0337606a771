"""Graph of Qwen2.5-VL (`models.vision_language.graph`)."""

from typing import Final

from models.base import ModelGraph
from models.vision_language.frame_options import FrameOptions
from models.vision_language.graph import vision_language_graph

GRAPH: Final[ModelGraph] = vision_language_graph(
    "qwen2_5_vl",
    {"Qwen2_5_VLForConditionalGeneration", "Qwen2VLForConditionalGeneration"},
    serves="Qwen2.5-VL and Qwen2-VL: the architectures Qwen2_5_VLForConditionalGeneration and Qwen2VL...",
    repository="Qwen/Qwen2.5-VL-3B-Instruct",
    modalities=("text", "image", "video"),
    options=FrameOptions,
)
