"""The KV node `Thinker` of Qwen2.5-Omni."""

from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

from models.omni.thinker import OmniThinker

RULES = modeling.Qwen2_5OmniPreTrainedModelForConditionalGeneration


class Thinker(OmniThinker):
    """Rows of media replace embeddings."""

    rules = RULES
