"""A checkpoint folder in Hugging Face format: its JSON files, and what may be wrong with it. No torch."""

import json
from pathlib import Path
from typing import Any

from shared.errors import ClientError


class CheckpointError(ClientError):
    """A checkpoint folder cannot be served: something in it is missing, damaged or unsupported.

    Trying again is of no use: a worker that meets one is not started again.
    """

    code = "invalid_checkpoint"


class UnsupportedArchitectureError(CheckpointError):
    """A whole checkpoint of a model that cannot be served exactly."""

    code = "unsupported_architecture"


def read_json(path: Path) -> dict[str, Any]:
    """The object in one of the folder's JSON files.

    Raises:
        CheckpointError: it is missing, or holds something else.
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
