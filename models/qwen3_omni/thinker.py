"""The KV node `Thinker` of Qwen3-Omni."""

from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

from models.omni.thinker import OmniThinker
from models.qwen3_vl.nodes import Qwen3VLDecoder

RULES = modeling.Qwen3OmniMoePreTrainedModelForConditionalGeneration


class Thinker(OmniThinker, Qwen3VLDecoder):
    """Rows of media are as Qwen3-VL's; those of audio add nothing to deeper layers."""

    fractional_positions = True
    rules = RULES
