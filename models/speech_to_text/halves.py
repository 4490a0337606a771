"""The encoder or the decoder of an encoder-decoder model, without the other half."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from models.checkpoints.files import read_json
from models.checkpoints.progress import Progress
from models.checkpoints.weights import read_shards
from models.transformers_lm.architecture import choose_dtype, config_of
from models.transformers_lm.tensors import load_weights

ENCODER: Final = "encoder"


def load_half(
    model_class: Any, checkpoint: Path, node: str, device: torch.device, dtype: str, progress: Progress
) -> Any:
    """Load one half. The tensors of the other one are never read.

    Args:
        model_class: transformers' class, with `model.encoder`, `model.decoder` and a head `proj_out`.
        checkpoint: a folder in Hugging Face format.
        node: `encoder`; any other name is the decoder with the head.
        device: of the weights.
        dtype: as configured.
        progress: is told the bytes that were read.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    config = config_of(model_class, read_json(checkpoint / "config.json"), checkpoint)
    shards = [
        replace(
            shard,
            tensors={k: v for k, v in shard.tensors.items() if (".encoder." in f".{k}") == (node == ENCODER)},
        )
        for shard in read_shards(checkpoint)
    ]
    half = _encoder_half(model_class) if node == ENCODER else _decoder_half(model_class)
    return load_weights(half, config, shards, device, choose_dtype(dtype, device, shards), progress)


def _decoder_half(model_class: Any) -> Any:
    def begin(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        self.model.encoder = None

    return _subclass(model_class, begin)


def _encoder_half(model_class: Any) -> Any:
    def begin(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        self.model.decoder, self.proj_out = None, None

    # Transformers ties the embeddings of the decoder, which is not there.
    return _subclass(model_class, begin, _tied_weights_keys={}, get_input_embeddings=lambda _: None)


def _subclass(model_class: Any, begin: Any, **attributes: Any) -> Any:
    # Transformers selects its rules by the name of the class.
    names = {"__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return type(model_class.__name__, (model_class,), names | {"__init__": begin} | attributes)
