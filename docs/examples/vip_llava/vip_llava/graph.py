"""Graph of ViP-LLaVA."""

from models.vision_language.graph import vision_language_graph

GRAPH = vision_language_graph(
    "vip_llava",
    {"VipLlavaForConditionalGeneration"},
    serves="ViP-LLaVA: the architecture VipLlavaForConditionalGeneration",
    repository="llava-hf/vip-llava-7b-hf",
)
