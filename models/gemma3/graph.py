"""Graph of Gemma 3 with images (`models.vision_language.graph`)."""

from typing import Final

import msgspec

from models.base import ModelGraph
from models.vision_language.graph import vision_language_graph


class Gemma3Options(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The view of each image.

    Attributes:
        do_pan_and_scan: look at parts of an image that is far from square, too, as further images.
    """

    do_pan_and_scan: bool = False


GRAPH: Final[ModelGraph] = vision_language_graph(
    "gemma3",
    {"Gemma3ForConditionalGeneration"},
    serves="Gemma 3 with images: the architecture Gemma3ForConditionalGeneration",
    repository="google/gemma-3-4b-it",
    options=Gemma3Options,
)
