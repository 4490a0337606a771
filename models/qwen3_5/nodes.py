"""The torch nodes of Qwen3.5: `llm`, with recurrent layers, and `vision_encoder`."""

from typing import Final

from models.qwen2_5_vl.nodes import Qwen2VLEncoder
from models.vision_language.axes import GridDecoder
from models.vision_language.nodes import examine, loader

__all__ = ["examine", "load"]

load: Final = loader(Qwen2VLEncoder, GridDecoder)
