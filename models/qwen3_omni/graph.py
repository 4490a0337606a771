"""Graph of Qwen3-Omni (`models.omni.graph`): frames of 80 ms, of several codes each."""

from typing import Final

from models.omni.graph import FIRST, Speaking, omni_graph
from models.qwen3_omni.options import Qwen3OmniOptions
from models.qwen3_omni.sampling import predictor_sampling
from shared.walks import LeftContext

SPEAKING: Final = Speaking(
    chunks=LeftContext(25, 25, first=FIRST),
    first_frames=((4, 4), (16, 8), (32, 16)),
    options=Qwen3OmniOptions,
    inner_sampling=predictor_sampling,
    codec_args=lambda _options, _speech: {},
)
GRAPH: Final = omni_graph(
    "qwen3_omni",
    ("Qwen3OmniMoeForConditionalGeneration",),
    name="Qwen3-Omni",
    speaking=SPEAKING,
    voices=("Ethan", "Chelsie", "Aiden"),
    repository="Qwen/Qwen3-Omni-30B-A3B-Instruct",
)
