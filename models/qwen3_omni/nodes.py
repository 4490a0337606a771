"""The torch nodes of Qwen3-Omni (`models.omni.nodes`)."""

from typing import Any, Final

from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

from models.base import KVLayout
from models.checkpoints.weights import read_shards, weights_digest
from models.omni.checkpoint import OmniCheckpoint
from models.omni.graph import CODES, TALKER
from models.omni.nodes import OmniNodes
from models.qwen3_omni.code2wav import Code2Wav
from models.qwen3_omni.talker import Talker
from models.qwen3_omni.thinker import Thinker
from models.qwen3_vl.nodes import Qwen3VLEncoder


def _state_layer(config: Any) -> int:
    return config.talker_config.accept_hidden_layer if config.talker_config is not None else 0


def _talker(read: OmniCheckpoint, model: Any) -> Talker:
    config = read.config
    text = config.talker_config.text_config
    return Talker(
        model,
        read.embeddings([config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id]),
        name=TALKER,
        layout=KVLayout(
            layers=text.num_hidden_layers, kv_heads=text.num_key_value_heads, head_dim=text.head_dim
        ),
        weights_digest=weights_digest(read_shards(read.folder)),
    )


_NODES: Final = OmniNodes(
    family="qwen3_omni",
    model_class=modeling.Qwen3OmniMoeForConditionalGeneration,
    thinker_class=modeling.Qwen3OmniMoeThinkerForConditionalGeneration,
    codec="code2wav",
    thinker=Thinker,
    vision=Qwen3VLEncoder,
    deepstack=lambda thinker: len(thinker.vision_config.deepstack_visual_indexes),
    state_layer=_state_layer,
    make_talker=_talker,
    make_codec=lambda _read, model: Code2Wav(model, CODES),
    talker_positions=lambda config: int(config.talker_config.text_config.max_position_embeddings),
)
load: Final = _NODES.load
examine: Final = _NODES.examine
