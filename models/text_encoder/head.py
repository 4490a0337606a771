"""The modules of a sentence-transformers folder behind the model: pooling, dense layers, normalization."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch.nn import functional

from models.checkpoints.files import CheckpointError
from models.checkpoints.weights import SINGLE, read_shard
from models.text_encoder.folder import Dense, LayerNorm, Normalize, SentenceFolder, Stage


def load_head(checkpoint: Path, settings: SentenceFolder, device: torch.device) -> "Head":
    """Load the modules behind the model, in float32.

    Raises:
        CheckpointError: a module's weights are missing, damaged or of another shape.
    """
    stages = [
        load_stage(checkpoint, stage).to(device).eval().requires_grad_(requires_grad=False)
        for stage in settings.stages
    ]
    return Head(settings, stages)


class Head:
    """The states of texts to their embeddings."""

    def __init__(self, settings: SentenceFolder, stages: Sequence[torch.nn.Module]) -> None:
        self._modes = settings.modes
        self._stages = stages
        self._is_normalized = settings.is_normalized
        self._default_size = settings.default_size

    def __call__(self, states: Sequence[torch.Tensor], skipped: Sequence[int]) -> torch.Tensor:
        """The embeddings, (texts, size) float32, of states (tokens, hidden); `skipped` ones do not count."""
        vectors = torch.stack(
            [pooled(one, self._modes, skip) for one, skip in zip(states, skipped, strict=True)]
        )
        for stage in self._stages:
            vectors = stage(vectors)
        return vectors

    def cut(self, vectors: torch.Tensor, dimensions: int | None) -> torch.Tensor:
        """The leading dimensions of embeddings; None: as many as the folder says.

        Those of a request are of length 1 again if the whole ones are. Those of the folder are not, because
        `encode` cuts without scaling.
        """
        if dimensions is None:
            return vectors[:, : self._default_size]
        if dimensions == vectors.shape[-1]:
            return vectors
        found = vectors[:, :dimensions]
        return functional.normalize(found, dim=-1) if self._is_normalized else found


def pooled(states: torch.Tensor, modes: Sequence[str], skipped: int = 0) -> torch.Tensor:
    """One vector of the states of a text, (tokens, hidden) -> (modes * hidden,) float32.

    The first `skipped` tokens, those of a prompt, do not count. If a text has no others, a mean is 0, and the
    first token, the last token and the maximum are those of all.
    """
    return torch.cat([_POOLING[mode](states, min(skipped, len(states))) for mode in modes])


def _mean(states: torch.Tensor, skipped: int) -> torch.Tensor:
    return states[skipped:].float().sum(0) / max(1, len(states) - skipped)


def _mean_sqrt(states: torch.Tensor, skipped: int) -> torch.Tensor:
    total: torch.Tensor = states[skipped:].float().sum(0)
    return total / math.sqrt(max(1, len(states) - skipped))


def _weighted_mean(states: torch.Tensor, skipped: int) -> torch.Tensor:
    weights = torch.arange(skipped + 1, len(states) + 1, device=states.device).float()
    total: torch.Tensor = weights @ states[skipped:].float()
    return total / weights.sum().clamp(min=1e-9)


def _first(states: torch.Tensor, skipped: int) -> torch.Tensor:
    return states[skipped if skipped < len(states) else 0].float()


def _last(states: torch.Tensor, _: int) -> torch.Tensor:
    return states[-1].float()


def _max(states: torch.Tensor, skipped: int) -> torch.Tensor:
    return states[skipped if skipped < len(states) else 0 :].amax(0).float()


_POOLING: Final[dict[str, Callable[[torch.Tensor, int], torch.Tensor]]] = {
    "cls": _first,
    "lasttoken": _last,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt,
    "weightedmean": _weighted_mean,
}


class _DenseLayer(torch.nn.Module):
    def __init__(self, settings: Dense) -> None:
        super().__init__()
        wide, narrow = settings.in_features, settings.out_features
        self.linear = torch.nn.Linear(wide, narrow, bias=settings.bias)
        self.activation = activation_of(settings.activation_function)
        self._has_residual = settings.use_residual
        if settings.use_residual and wide != narrow:
            self.residual = torch.nn.Linear(wide, narrow, bias=False)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.activation(self.linear(vectors))
        if not self._has_residual:
            return found
        return found + (self.residual(vectors) if hasattr(self, "residual") else vectors)


class _NormLayer(torch.nn.Module):
    def __init__(self, settings: LayerNorm) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(settings.dimension)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(vectors)
        return found


class _Unit(torch.nn.Module):
    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return functional.normalize(vectors, dim=-1)


def activation_of(name: str) -> torch.nn.Module:
    """The activation of that name, such as `torch.nn.modules.activation.Tanh`.

    Raises:
        CheckpointError: it is no module of torch that needs no arguments.
    """
    found: Any = getattr(torch.nn, name.rpartition(".")[2], None) if name.startswith("torch.nn.") else None
    if not isinstance(found, type) or not issubclass(found, torch.nn.Module):
        raise CheckpointError(
            f"activation_function: expected an activation of torch.nn, found {name!r} (remote code is never "
            "run)"
        )
    try:
        return found()
    except TypeError as error:
        raise CheckpointError(f"activation_function: {name!r} is not supported: {error}") from error


def load_stage(checkpoint: Path, stage: Stage) -> torch.nn.Module:
    """Load a module behind the model, in float32.

    Raises:
        CheckpointError: its weights are missing, damaged or of another shape.
    """
    if isinstance(stage, Normalize):
        return _Unit()
    module = _DenseLayer(stage) if isinstance(stage, Dense) else _NormLayer(stage)
    path = checkpoint / stage.path / SINGLE
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: expected the weights of a module in safetensors; convert the folder with "
            "SentenceTransformer(folder).save(folder)"
        )
    read_shard(path)
    try:
        module.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()})
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the module: {' '.join(str(error).split())}") from error
    return module
