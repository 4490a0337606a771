"""Graph of Qwen2.5-Omni (`models.omni.graph`): frames of 20 ms, of one code each."""

from collections.abc import Mapping
from typing import Any, Final

from models.omni.graph import FIRST, Speaking, omni_graph
from models.omni.prepared import Speech
from models.qwen2_5_omni.options import Qwen25OmniOptions
from shared.walks import LeftContext

BLOCK_FRAMES: Final = 12
"""The frames of a block of the flow, which sees two blocks back and one ahead: chunks are whole blocks."""


def _codec_args(options: Qwen25OmniOptions, speech: Speech) -> Mapping[str, Any]:
    return {
        "voice": speech.voice,
        "num_steps": options.token2wav_num_steps,
        "guidance_scale": options.token2wav_guidance_scale,
        "sway_coefficient": options.token2wav_sway_coefficient,
    }


SPEAKING: Final = Speaking(
    # The last block of a chunk is sounded with the next one, so it is a part of its context.
    chunks=LeftContext(4 * BLOCK_FRAMES, 3 * BLOCK_FRAMES, first=FIRST),
    first_frames=((4, 2 * BLOCK_FRAMES),),
    options=Qwen25OmniOptions,
    inner_sampling=lambda _options: None,
    codec_args=_codec_args,
)
GRAPH: Final = omni_graph(
    "qwen2_5_omni",
    ("Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel"),
    name="Qwen2.5-Omni",
    speaking=SPEAKING,
    voices=("Chelsie", "Ethan"),
    repository="Qwen/Qwen2.5-Omni-7B",
)
