"""The request parameters of Qwen2.5-Omni, with the defaults of transformers. Pure: the graph imports it."""

from typing import Annotated

from msgspec import Meta

from models.omni.options import OmniOptions, TopK, TopP


class Qwen25OmniOptions(OmniOptions, frozen=True, kw_only=True, omit_defaults=True):
    """Options of text and speech, of which a frame is one code of 20 ms.

    Attributes:
        token2wav_num_steps: the times at which the flow from noise to sound is followed.
        token2wav_guidance_scale: how much more than without them the codes and the voice matter; 0 is off.
        token2wav_sway_coefficient: moves these times: below 0 towards the noise.
    """

    talker_top_k: TopK = 40
    talker_top_p: TopP = 0.8
    token2wav_num_steps: Annotated[int, Meta(ge=2, le=100)] = 10
    token2wav_guidance_scale: Annotated[float, Meta(ge=0, le=10)] = 0.5
    token2wav_sway_coefficient: Annotated[float, Meta(ge=-1, le=1)] = -1.0
    initial_codec_chunk_frames: Annotated[int, Meta(ge=24, le=48, multiple_of=12)] | None = None
