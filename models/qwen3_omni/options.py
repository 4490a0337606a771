"""The request parameters of Qwen3-Omni, under M*'s names. Pure: the graph imports it."""

from typing import Annotated

from msgspec import Meta

from models.omni.options import OmniOptions, Temperature, TopK, TopP


class Qwen3OmniOptions(OmniOptions, frozen=True, kw_only=True, omit_defaults=True):
    """Options of text and speech, of which a frame is 80 ms.

    Attributes:
        code_predictor_temperature: of the other codes of each frame. Default: 1, or 0 where the talker is
            greedy.
        code_predictor_top_k: the likeliest other codes to choose from; 0 is all.
        code_predictor_top_p: the share of the probability of other codes to choose from.
    """

    code_predictor_temperature: Temperature | None = None
    code_predictor_top_k: TopK = 50
    code_predictor_top_p: TopP = 0.8
    initial_codec_chunk_frames: Annotated[int, Meta(ge=1, le=25)] | None = None
