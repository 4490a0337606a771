"""The torch nodes. The weights of the predictor are loaded once in a process, for all of its nodes."""

from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Final, TypeAlias
from weakref import WeakValueDictionary

import torch
from transformers import VJEPA2Config
from transformers.models.vjepa2.modeling_vjepa2 import VJEPA2Encoder

from models.checkpoints.progress import Progress, silent
from models.transformers_lm.architecture import choose_dtype
from models.vjepa2_ac.graph import ENCODER, ROLLOUT, SCORER
from models.vjepa2_ac.node import RolloutNode
from models.vjepa2_ac.predictor import EPS, AcPredictor
from models.vjepa2_ac.settings import AcSettings, weights_of
from models.vjepa2_ac.stateless import Encoder, Predictor, Scorer
from models.vjepa2_ac.weights import Tensors, fill, for_transformers, read_part

AnyNode: TypeAlias = Encoder | Predictor | RolloutNode | Scorer

_networks: Final[WeakValueDictionary[tuple[object, ...], AcPredictor]] = WeakValueDictionary()
_lock: Final = Lock()


def load(
    checkpoint: Path,
    node: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any],
) -> AnyNode:
    """Load one node of a checkpoint folder.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    if node == SCORER:
        return Scorer()
    settings = AcSettings.read(checkpoint)
    if node == ENCODER:
        return Encoder(_encoder(checkpoint, settings, device, dtype, progress), settings.tubelet_size)
    path = weights_of(checkpoint)
    key = (path, path.stat().st_mtime_ns, str(device), dtype)
    with _lock:
        network = _networks.get(key)
        if network is None:
            network = _networks[key] = _predictor(checkpoint, settings, device, dtype, progress)
    return RolloutNode(network, node) if node == ROLLOUT else Predictor(network)


def _predictor(
    checkpoint: Path, settings: AcSettings, device: str | torch.device, dtype: str, progress: Progress
) -> AcPredictor:
    tensors = _moved(read_part(checkpoint, "predictor"), device, dtype, progress)
    with torch.device("meta"):
        network = AcPredictor(settings)
    found: AcPredictor = fill(network, tensors, weights_of(checkpoint), "predictor")
    return found


def _encoder(
    checkpoint: Path, settings: AcSettings, device: str | torch.device, dtype: str, progress: Progress
) -> Any:
    tensors = _moved(for_transformers(read_part(checkpoint, "encoder")), device, dtype, progress)
    hidden = tensors.get("layer.0.mlp.fc1.weight")
    config = VJEPA2Config(
        **{name: getattr(settings, name) for name in VJEPA2Config().to_dict() if hasattr(settings, name)},
        mlp_ratio=len(hidden) / settings.hidden_size if hidden is not None else 4.0,
        layer_norm_eps=EPS,
    )
    config._attn_implementation = "sdpa"  # noqa: SLF001 - as transformers' own models are set
    with torch.device("meta"):
        model = VJEPA2Encoder(config)
    return fill(model, tensors, weights_of(checkpoint), "encoder")


def _moved(tensors: Tensors, device: str | torch.device, dtype: str, progress: Progress) -> Tensors:
    """The tensors on the device, in the dtype; `auto` is the stored one."""
    chosen = None if dtype == "auto" else choose_dtype(dtype, torch.device(device), [])
    total, done = sum(tensor.nbytes for tensor in tensors.values()), 0
    found: Tensors = {}
    for name, tensor in tensors.items():
        found[name] = tensor.to(device=device, dtype=chosen)
        done += tensor.nbytes
        progress(done, total, name)
    return found
