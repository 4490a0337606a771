"""The torch nodes of Qwen2.5-Omni (`models.omni.nodes`)."""

from typing import Any, Final

from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

from models.base import KVLayout
from models.checkpoints.files import UnsupportedArchitectureError
from models.checkpoints.weights import read_shards, weights_digest
from models.omni.checkpoint import OmniCheckpoint
from models.omni.graph import CODES, TALKER
from models.omni.nodes import OmniNodes
from models.qwen2_5_omni.code2wav import Code2Wav
from models.qwen2_5_omni.graph import BLOCK_FRAMES
from models.qwen2_5_omni.talker import Talker
from models.qwen2_5_omni.thinker import Thinker
from models.qwen2_5_omni.voices import read_voices
from models.qwen2_5_vl.nodes import Qwen2VLEncoder


def _talker(read: OmniCheckpoint, model: Any) -> Talker:
    config = read.config.talker_config
    voices = [voice.token for voice in read_voices(read.folder).values()]
    marks = [config.tts_text_end_token_id, config.tts_text_pad_token_id, *voices]
    return Talker(
        model,
        dict(zip(marks, read.embeddings(marks), strict=True)),
        sounded=read.config.token2wav_config.dit_config.num_embeds + 1,
        name=TALKER,
        layout=KVLayout(
            layers=config.num_hidden_layers, kv_heads=config.num_key_value_heads, head_dim=config.head_dim
        ),
        weights_digest=weights_digest(read_shards(read.folder)),
    )


def _codec(read: OmniCheckpoint, model: Any) -> Code2Wav:
    flow = read.config.token2wav_config.dit_config
    if BLOCK_FRAMES * flow.repeats % flow.block_size:
        raise UnsupportedArchitectureError(
            f"{read.folder}: sound is made in chunks of {BLOCK_FRAMES * flow.repeats} rows; expected these "
            f"to be whole blocks of the flow, found blocks of {flow.block_size} (block_size)"
        )
    return Code2Wav(model, read_voices(read.folder), CODES)


_NODES: Final = OmniNodes(
    family="qwen2_5_omni",
    model_class=modeling.Qwen2_5OmniForConditionalGeneration,
    thinker_class=modeling.Qwen2_5OmniThinkerForConditionalGeneration,
    codec="token2wav",
    thinker=Thinker,
    vision=Qwen2VLEncoder,
    deepstack=lambda _thinker: 0,
    state_layer=lambda _config: 0,
    make_talker=_talker,
    make_codec=_codec,
    talker_positions=lambda config: int(config.talker_config.max_position_embeddings),
)
load: Final = _NODES.load
examine: Final = _NODES.examine
