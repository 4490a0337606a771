"""The normalization statistics of a checkpoint: a robot's units to the model's numbers, and back. No torch.

    lerobot        policy_preprocessor.json, policy_postprocessor.json, and the safetensors that they name
    openpi         norm_stats.json, in the folder or below `assets`
    transformers   processor_config.json: state_mean, state_std, actions_mean, actions_std

A checkpoint without statistics, such as a base model, takes and returns the model's numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from models.checkpoints.files import CheckpointError, read_json, read_json_if_present
from shared.errors import ClientError

Floats: TypeAlias = npt.NDArray[np.float32]
STATE: Final = "observation.state"
ACTION: Final = "action"
_OPENPI: Final = {STATE: "state", ACTION: "actions"}
_LEROBOT_EPS: Final = 1e-8
_OPENPI_EPS: Final = 1e-6
_BOUNDS: Final = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}


@dataclass(frozen=True, slots=True, eq=False)
class Standard:
    """Mean 0 and deviation 1: (x - mean) / std."""

    mean: Floats
    std: Floats
    inverse_std: Floats

    @property
    def length(self) -> int:
        return len(self.mean)

    def normalize(self, values: Floats) -> Floats:
        own = values.shape[-1]
        return (values - self.mean[:own]) / self.std[:own]

    def restore(self, values: Floats) -> Floats:
        own = values.shape[-1]
        return values * self.inverse_std[:own] + self.mean[:own]


@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """From -1 to 1 between two bounds: 2 (x - low) / span - 1."""

    low: Floats
    span: Floats

    @property
    def length(self) -> int:
        return len(self.low)

    def normalize(self, values: Floats) -> Floats:
        own = values.shape[-1]
        return np.float32(2.0) * (values - self.low[:own]) / self.span[:own] - np.float32(1.0)

    def restore(self, values: Floats) -> Floats:
        own = values.shape[-1]
        return (values + np.float32(1.0)) * self.span[:own] / np.float32(2.0) + self.low[:own]


@dataclass(frozen=True, slots=True, eq=False)
class Normalization:
    """The statistics of states and actions; None for numbers that are left as they are.

    Attributes:
        state_dims: the lengths of states that the statistics are of. Those of openpi may be padded.
    """

    state: Standard | Range | None = None
    action: Standard | Range | None = None
    state_dims: range = range(0)

    @classmethod
    def read(cls, checkpoint: Path, *, quantiles: bool) -> "Normalization":
        """Read the statistics of a checkpoint.

        Args:
            checkpoint: the folder.
            quantiles: the family's own mode, where the checkpoint names none: quantiles, or mean and
                deviation.

        Raises:
            CheckpointError: a file is malformed, or lacks a statistic that the mode needs.
        """
        found = _statistics(checkpoint, "QUANTILES" if quantiles else "MEAN_STD")
        state, action = (found[key].scale() if key in found else None for key in (STATE, ACTION))
        lengths = range(found[STATE].used, state.length + 1) if state is not None else range(0)
        return cls(state=state, action=action, state_dims=lengths)

    def normalized(self, state: Floats) -> Floats:
        """The model's numbers of a state in the robot's units, (n,).

        Raises:
            ClientError: the statistics are of fewer or more numbers.
        """
        if self.state is None:
            return state
        if len(state) not in self.state_dims:
            raise ClientError(
                f"robot_state: expected {self.state_dims[0]} numbers, as the checkpoint's statistics are of, "
                f"found {len(state)}"
            )
        return self.state.normalize(state).astype(np.float32)

    def restored(self, actions: Floats) -> Floats:
        """Actions in the robot's units, (horizon, n), of the model's, (horizon, m).

        Numbers beyond the statistics are padding: they are left as they are.
        """
        if self.action is None:
            return actions
        own = min(self.action.length, actions.shape[1])
        return np.concatenate([self.action.restore(actions[:, :own]), actions[:, own:]], axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Statistics:
    """The statistics of states or of actions, as a file has them.

    Attributes:
        mode: lerobot's name of the transformation.
        where: the file, for errors.
        eps: the small number that keeps a divisor from 0.
        widens: it is added to every span, and to deviations on the way back; otherwise only where it must be.
    """

    values: Mapping[str, Floats]
    mode: str
    where: Path
    eps: float
    widens: bool

    @property
    def used(self) -> int:
        """The number of values that are no padding: statistics of padding are 0."""
        if not self.widens:
            return max(len(one) for one in self.values.values())
        return 1 + max((int(np.flatnonzero(one)[-1]) for one in self.values.values() if one.any()), default=0)

    def scale(self) -> Standard | Range | None:
        """The transformation; None for numbers that are left as they are.

        Raises:
            CheckpointError: the mode is unknown, or a statistic is missing.
        """
        if self.mode == "IDENTITY":
            return None
        names = ("mean", "std") if self.mode == "MEAN_STD" else _BOUNDS.get(self.mode)
        if names is None:
            raise CheckpointError(
                f"{self.where}: expected one of MEAN_STD, {', '.join(_BOUNDS)} or IDENTITY as the mode, "
                f"found {self.mode!r}"
            )
        if missing := [name for name in names if name not in self.values]:
            raise CheckpointError(
                f"{self.where}: the mode {self.mode} needs {' and '.join(missing)}, found "
                f"{', '.join(self.values)}"
            )
        first, second = (self.values[name] for name in names)
        if first.ndim != 1 or first.shape != second.shape:
            raise CheckpointError(
                f"{self.where}: expected {names[0]} and {names[1]} of one length, found {first.shape} and "
                f"{second.shape}"
            )
        eps = np.float32(self.eps)
        if self.mode == "MEAN_STD":
            return Standard(first, second + eps, second + eps if self.widens else second)
        span = second - first
        return Range(first, span + eps if self.widens else np.where(span == 0, eps, span))


def _statistics(checkpoint: Path, default: str) -> dict[str, _Statistics]:
    """The statistics of states and actions that a checkpoint has, by lerobot's names of the two."""
    if (path := checkpoint / "policy_preprocessor.json").is_file():
        after = checkpoint / "policy_postprocessor.json"
        found = {
            STATE: _of_lerobot(path, "normalizer_processor", STATE),
            ACTION: _of_lerobot(after, "unnormalizer_processor", ACTION),
        }
        return {key: one for key, one in found.items() if one is not None}
    if (stats := _openpi_file(checkpoint)) is not None:
        return _of_openpi(stats, default)
    path = checkpoint / "processor_config.json"
    raw = read_json_if_present(path)
    return {
        key: _Statistics(
            values=_arrays({"mean": raw[f"{name}_mean"], "std": raw[f"{name}_std"]}),
            mode="MEAN_STD",
            where=path,
            eps=_LEROBOT_EPS,
            widens=True,
        )
        for key, name in _OPENPI.items()
        if raw.get(f"{name}_mean") is not None and raw.get(f"{name}_std") is not None
    }


def _of_openpi(path: Path, mode: str) -> dict[str, _Statistics]:
    stats = read_json(path).get("norm_stats")
    if not isinstance(stats, dict):
        raise CheckpointError(f"{path}: expected an object norm_stats, found {stats!r:.80}")
    return {
        key: _Statistics(values=_arrays(stats[name]), mode=mode, where=path, eps=_OPENPI_EPS, widens=True)
        for key, name in _OPENPI.items()
        if name in stats
    }


def _openpi_file(checkpoint: Path) -> Path | None:
    """The only `norm_stats.json` of a folder; None if there is none."""
    found = [one for one in (checkpoint / "norm_stats.json",) if one.is_file()] or sorted(
        (checkpoint / "assets").rglob("norm_stats.json")
    )
    if len(found) > 1:
        raise CheckpointError(
            f"{checkpoint} has statistics of {len(found)} data sets, {found[0]} and others: expected one; "
            "copy the robot's to norm_stats.json in the folder"
        )
    return found[0] if found else None


def _of_lerobot(path: Path, step: str, key: str) -> _Statistics | None:
    """The statistics in a step of a processor; None if it has none of that key."""
    for one in read_json_if_present(path).get("steps", []):
        if one.get("registry_name") != step or one.get("state_file") is None:
            continue
        config, named = one.get("config", {}), path.parent / Path(str(one["state_file"])).name
        try:
            tensors = load_file(named)
        except Exception as error:
            raise CheckpointError(f"{named}, which {path.name} names, cannot be read: {error}") from error
        prefix = f"{key}."
        own = {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}
        if own:
            return _Statistics(
                values=_arrays({name: value for name, value in own.items() if value.ndim == 1}),
                mode=config.get("norm_map", {}).get("ACTION" if key == ACTION else "STATE", "IDENTITY"),
                where=named,
                eps=float(config.get("eps", _LEROBOT_EPS)),
                widens=False,
            )
    return None


def _arrays(stats: Mapping[str, Any]) -> dict[str, Floats]:
    return {name: np.asarray(value, np.float32) for name, value in stats.items() if value is not None}
