"""The request parameters of models that think and talk, under M*'s names. Pure: the graphs import it."""

from typing import Annotated, ClassVar

from msgspec import Meta

from models.vision_language.frame_options import FrameOptions

Temperature = Annotated[float, Meta(ge=0, le=2)]
TopK = Annotated[int, Meta(ge=0)]
TopP = Annotated[float, Meta(gt=0, le=1)]


class OmniOptions(FrameOptions, frozen=True, kw_only=True, omit_defaults=True):
    """Options of text and speech.

    Attributes:
        thinker_temperature: of the text, if the request has no `temperature`. Default: the checkpoint's, or
            else 0.7.
        thinker_top_p: of the text, if the request has no `top_p`. Default: the checkpoint's, or else 0.9.
        talker_temperature: of the first code of each frame of speech. 0 is greedy.
        talker_top_k: the likeliest first codes to choose from; 0 is all.
        talker_top_p: the share of the probability of first codes to choose from.
        talker_repetition_penalty: makes first codes that were said less likely, if above 1.
        talker_max_output_tokens: the most frames of speech. Default: 4096, or what fits.
        use_audio_in_video: hear the sound track of each video, too.
        initial_codec_chunk_frames: the frames of the first chunk of audio; each next one has twice as many,
            up to a whole chunk. Default: few, or more while many requests run.
    """

    OTHER_NAMES: ClassVar = {
        "talker_max_tokens": "talker_max_output_tokens",
        "talker_max_new_tokens": "talker_max_output_tokens",
    }

    thinker_temperature: Temperature | None = None
    thinker_top_p: TopP | None = None
    talker_temperature: Temperature = 0.9
    talker_top_k: TopK = 50
    talker_top_p: TopP = 1.0
    talker_repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.05
    talker_max_output_tokens: Annotated[int, Meta(ge=1, le=32768)] | None = None
    use_audio_in_video: bool = False
    initial_codec_chunk_frames: Annotated[int, Meta(ge=1, le=96)] | None = None
