"""Graph and plan of text encoders.

    embed    texts -> token ids -> an embedding of each      the CPU node `prepare`, the node `encoder`

All texts of a request are one walk, and the encoder packs those of all waiting requests.
"""

from typing import ClassVar, Final

import msgspec

from models.base import EMBEDDING, EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.text import embedding
from models.text_encoder.requests import one_walk
from shared.plans import Plan, PlanRequest
from shared.walks import CLIENT, Edge, Node, Sequential, compile_walk

PREPARE: Final = "prepare"
ENCODER: Final = "encoder"
EMBED: Final = Sequential(
    Node(PREPARE, (), [Edge("tokens", to=ENCODER), Edge("lengths", to=ENCODER)]),
    Node(ENCODER, ["tokens", "lengths"], [Edge(EMBEDDING, to=CLIENT(EMBEDDING), on_resume="keep")]),
)
ENCODERS: Final = frozenset(
    {
        "albert", "bert", "camembert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra",
        "ernie", "esm", "eurobert", "gte", "jina_embeddings_v3", "megatron-bert", "mobilebert", "modernbert",
        "mpnet", "nomic_bert", "rembert", "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta",
        "xlm-roberta-xl", "xmod",
    }
)  # fmt: skip
"""The values of `model_type` of models that are encoders of texts."""
HEADS: Final = ("Model", "ForMaskedLM", "ForPreTraining")


class TextEncoderOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The prompt that is put before each text. Token ids get none.

    Attributes:
        prompt_name: the name of one of the folder's prompts (`config_sentence_transformers.json`). Default:
            the folder's own choice.
        prompt: the text of a prompt; it takes precedence over `prompt_name`.
    """

    OTHER_NAMES: ClassVar[dict[str, str]] = {"instruction": "prompt"}
    prompt_name: str | None = None
    prompt: str | None = None


def plan(request: PlanRequest) -> Plan:
    """One walk, whose output is one embedding of each text, float32."""
    return (yield from one_walk("embed", request))


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim encoders of texts, and sentence-transformers folders that are pooled from another model of texts.

    A causal language model is left to `decoder_lm` if that can pool it.
    """
    kinds = [module.kind for module in embedding.modules_of(checkpoint.folder)]
    if "vision_config" in checkpoint.config or (kinds and "Pooling" not in kinds):
        return None
    architecture = checkpoint.architecture
    if architecture.endswith("ForCausalLM"):
        return Claim.CHECKPOINT if kinds and embedding.read(checkpoint.folder).unsupported else None
    is_encoder = checkpoint.config.get("model_type") in ENCODERS
    is_bidirectional = checkpoint.config.get("use_bidirectional_attention") is True
    if architecture.endswith("Model" if not is_encoder else HEADS) and (
        kinds or is_encoder or is_bidirectional
    ):
        return Claim.ARCHITECTURE
    return None


GRAPH: Final = ModelGraph(
    family="text_encoder",
    nodes={PREPARE: EngineKind.CPU, ENCODER: EngineKind.STATELESS},
    walks={"embed": compile_walk("embed", EMBED)},
    plan=plan,
    options=TextEncoderOptions,
    takes_texts=True,
    max_positions=512,
    claims=claims,
    repository="sentence-transformers/all-MiniLM-L6-v2",
    serves="encoders of texts (BERT, RoBERTa, ModernBERT and others), sentence-transformers folders",
)
