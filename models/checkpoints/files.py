"""JSON files of a checkpoint folder in Hugging Face format, and the errors of checkpoints. No torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shared.errors import ClientError

CONFIG: Final = "config.json"
PIPELINE: Final = "model_index.json"
"""The list of the parts of a pipeline of diffusers, each of which has a folder with a config."""
LLM: Final = "llm_config.json"
"""The config of the language model, in a folder with a config of each part, as BAGEL's."""

ONE_FILE: Final = "*vjepa2-ac*.pt"
"""A checkpoint that is one file without a config; its name says what it is."""
_LENGTHS: Final = ("max_position_embeddings", "max_sequence_length", "n_positions")
"""The names of the longest sequence in a `config.json`: of most models, of LLaDA, and of GPT-2."""


RECOMPUTED_AT_CHANGE: Final = frozenset({"Phi3ForCausalLM", "PhimoeForCausalLM"})
"""Architectures whose `generate` computes all keys again when a text outgrows its rotary factors.

All others keep keys with short factors beside keys with long ones."""


class CheckpointError(ClientError):
    """A checkpoint folder cannot be served: a file is missing, damaged or unsupported.

    It is permanent: a worker that fails with it is not restarted.
    """

    code = "invalid_checkpoint"


class UnsupportedArchitectureError(CheckpointError):
    """The checkpoint is intact, but its architecture cannot be served exactly."""

    code = "unsupported_architecture"


def read_json(path: Path) -> dict[str, Any]:
    """The object in one of the folder's JSON files.

    Raises:
        CheckpointError: the file is missing, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} cannot be read: expected a JSON object, found {type(found).__name__}")
    return found


def read_json_if_present(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file.

    Raises:
        CheckpointError: the file holds something else.
    """
    return read_json(path) if path.is_file() else {}


def has_config(folder: Path) -> bool:
    """True if a folder says what it is: in `CONFIG`, `LLM` or `PIPELINE`, or by a file (`ONE_FILE`)."""
    return (folder / CONFIG).is_file() or _has_no_config(folder)


def _has_no_config(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (LLM, PIPELINE)) or any(folder.glob(ONE_FILE))


def read_config(folder: Path) -> dict[str, Any]:
    """The object in `config.json`; empty for a folder that says what it is in another way (`has_config`).

    Raises:
        CheckpointError: the file is missing, or holds something else.
    """
    return {} if not (folder / CONFIG).is_file() and _has_no_config(folder) else read_json(folder / CONFIG)


def read_language_config(folder: Path) -> dict[str, Any]:
    """The config of a checkpoint's language model: `llm_config.json` where there is one, or `config.json`.

    Raises:
        CheckpointError: the file is missing, or holds something else.
    """
    return read_json(folder / LLM) if (folder / LLM).is_file() else read_config(folder)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model in a `config.json`: a part of that of a model of several parts."""
    for part in ("text_config", "thinker_config"):  # the thinker of a model that talks has parts of its own
        own = config.get(part)
        if isinstance(own, dict):
            return text_config(own)
    return config


def context_length(config: Mapping[str, Any]) -> int | None:
    """The longest sequence of a model, in tokens, by its `config.json`; None if it is not stated.

    It is less than `max_position_embeddings` for models whose long sequences use other rotary factors than
    short ones (`long_factor`), unless they are served with both (`RECOMPUTED_AT_CHANGE`): sequences are
    limited to those with short factors.
    """
    whole, config = config, text_config(config)
    length = next((config[name] for name in _LENGTHS if name in config), None)
    if not isinstance(length, int):
        return None
    if whole is config and RECOMPUTED_AT_CHANGE.intersection(config.get("architectures") or ()):
        return length
    ropes = [config.get("rope_scaling"), config.get("rope_parameters")]
    ropes += [part for rope in ropes if isinstance(rope, dict) for part in rope.values()]
    changes = [
        rope.get("original_max_position_embeddings")
        for rope in ropes
        if isinstance(rope, dict) and "long_factor" in rope
    ]
    if changes:
        changes.append(config.get("original_max_position_embeddings"))
    return min([length, *(change for change in changes if isinstance(change, int))])
