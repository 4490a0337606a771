"""The backbone of a text encoder: its class in transformers without pooler and heads, and its weights.

Checkpoints of older layouts are read too: with the heads of pretraining, with the name of the model before
each tensor (`bert.encoder...`), and with buffers that follow from `config.json`.
"""

import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, Final

import torch
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from models.checkpoints.files import UnsupportedArchitectureError, read_json
from models.checkpoints.progress import Progress
from models.checkpoints.weights import Shard, read_shards
from models.transformers_lm.architecture import choose_dtype, config_of, model_class_of
from models.transformers_lm.tensors import load_weights

_KIND: Final = r"(Model|For[A-Z]\w+)"
_WHAT: Final = "text encoder"
_COLBERT: Final = "HF_ColBERT"
"""The architecture in folders of ColBERT's authors: the model of `model_type`, and a projection."""
_HEADS: Final = frozenset(
    {
        "classifier", "cls", "decoder", "discriminator_predictions", "generator_lm_head",
        "generator_predictions", "head", "lm_head", "pooler", "predictions", "pre_classifier", "score",
        "sop_classifier", "vocab_layer_norm", "vocab_projector", "vocab_transform",
    }
)  # fmt: skip
"""The first parts of names of tensors that no backbone has."""
_RECOMPUTED: Final = re.compile(r"(^|\.)(position_ids|token_type_ids|rotary_emb\.\w*inv_freq)$")


def load_model(
    checkpoint: Path,
    *,
    device: str | torch.device,
    dtype: str,
    progress: Progress,
    model_class: Any = None,
) -> Any:
    """Load the model of a checkpoint folder in Hugging Face format, ready for inference.

    `model_class` is a class of transformers, by default the backbone of the one that `config.json` names. Of
    a class with heads all tensors are loaded, of a backbone those of the heads are not read.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    raw = read_json(checkpoint / "config.json")
    shards = read_shards(checkpoint)
    if model_class is None:
        model_class = _without_pooler(backbone_class_of(raw, checkpoint))
        shards = [
            _only(shard, _of_backbone(shard.tensors, model_class.base_model_prefix)) for shard in shards
        ]
    else:
        shards = [_only(shard, {n for n in shard.tensors if not _RECOMPUTED.search(n)}) for shard in shards]
    config = config_of(model_class, raw, checkpoint)
    on = torch.device(device)
    model = load_weights(model_class, config, shards, on, choose_dtype(dtype, on, shards), progress)
    return model.eval()


def backbone_class_of(raw: dict[str, Any], checkpoint: Path) -> Any:
    """The class without heads of the one that `config.json` names: BertModel for BertForMaskedLM.

    Raises:
        CheckpointError, UnsupportedArchitectureError: transformers has none.
    """
    if raw.get("architectures") == [_COLBERT]:
        raw = raw | {"architectures": [MODEL_MAPPING_NAMES.get(raw.get("model_type"), _COLBERT)]}
    found = model_class_of(raw, checkpoint, _KIND, what=_WHAT)
    name = re.sub(r"(LMHeadModel|For[A-Z]\w+)$", "Model", found.__name__)
    backbone = getattr(sys.modules[found.__module__], name, None)
    if backbone is None:
        raise UnsupportedArchitectureError(
            f"{checkpoint}: {found.__name__} is not served: expected a class with a part {name} without heads"
        )
    return backbone


def _without_pooler(model_class: Any) -> Any:
    """The class without its pooler, whose weights many checkpoints lack, under its own name."""
    if "add_pooling_layer" not in signature(model_class.__init__).parameters:
        return model_class

    def begin(self: Any, config: Any) -> None:
        model_class.__init__(self, config, add_pooling_layer=False)

    names = {"__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return type(model_class.__name__, (model_class,), names | {"__init__": begin})


def _of_backbone(names: Iterable[str], prefix: str) -> set[str]:
    """The names of a backbone's tensors in a checkpoint, where they may begin with the model's name."""
    kept = {name for name in names if not _RECOMPUTED.search(name)}
    prefixed = {name for name in kept if name.startswith(f"{prefix}.")}
    if prefixed:
        return {name for name in prefixed if name.split(".")[1] != "pooler"}
    return {name for name in kept if name.split(".")[0] not in _HEADS}


def _only(shard: Shard, names: set[str]) -> Shard:
    return replace(shard, tensors={name: info for name, info in shard.tensors.items() if name in names})
