"""OpenAI's file objects for stored media.

A file's id is `file-` and the digest of its bytes, so that equal bytes are one file.
"""

from typing import Any, Final

from gateway.errors import InvalidParamError
from gateway.media.sources import FILE_PREFIX
from shared.media.addresses import is_digest
from shared.media.store import MediumState, StoredMedium
from shared.validation_errors import described

PURPOSES: Final = ("user_data", "vision", "assistants", "batch", "fine-tune", "evals")
"""OpenAI's purposes. All are accepted. Those of media are the same here: each can be used in requests."""
BATCH: Final = "batch"
"""The purpose of a file of requests, whose type is `LINES_TYPE`."""
LINES_TYPE: Final = "application/jsonl"
RESULTS_TYPE: Final = f"{LINES_TYPE}; profile=batch_output"
"""The type of the files that batches make."""
_PURPOSES_BY_TYPE: Final = {LINES_TYPE: BATCH, RESULTS_TYPE: "batch_output"}
_NS: Final = 1_000_000_000


class NoFileError(InvalidParamError):
    """There is no file of this id, or it belongs to another tenant."""

    def __init__(self, file_id: str, param: str = "file_id") -> None:
        super().__init__(
            param,
            f"there is no file {file_id[:80]!r} here: it expired, was deleted, or was never stored with "
            "this API key",
            code="file_not_found",
            status=404,
        )


def digest_of(file_id: str, param: str = "file_id") -> str:
    """Return the digest in an id; `param` is the field with it.

    Raises:
        NoFileError: it is no id of a file.
    """
    digest = file_id.removeprefix(FILE_PREFIX)
    if not is_digest(digest):
        raise NoFileError(file_id, param)
    return digest


def check_purpose(found: object) -> str:
    """Return a purpose; the default is `user_data`.

    Raises:
        InvalidParamError: it is none of OpenAI's.
    """
    if found is None or found == "":
        return PURPOSES[0]
    if found not in PURPOSES:
        raise InvalidParamError(
            "purpose", f"purpose: expected one of {', '.join(PURPOSES)}, found {described(found)}"
        )
    return str(found)


def purpose_of(medium: StoredMedium) -> str:
    """Return the purpose that follows from a medium's type."""
    return _PURPOSES_BY_TYPE.get(medium.content_type, PURPOSES[0])


def file_object(
    medium: StoredMedium, *, purpose: str | None = None, name: str | None = None
) -> dict[str, Any]:
    """Return the file object of a complete medium; `received_bytes` and `content_type` are ours."""
    return {
        **_object(medium.digest, name or medium.name, purpose or purpose_of(medium)),
        "bytes": medium.size,
        "created_at": medium.stored_ns // _NS,
        "expires_at": None if medium.expires_ns is None else medium.expires_ns // _NS,
        "status": "processed",
        "content_type": medium.content_type,
        "received_bytes": medium.size,
    }


def upload_object(digest: str, state: MediumState) -> dict[str, Any]:
    """Return the file object of a digest whose upload is not complete."""
    return {
        **_object(digest, None, PURPOSES[0]),
        "bytes": 0,
        "created_at": 0,
        "expires_at": None,
        "status": "uploading",
        "content_type": None,
        "received_bytes": state.received,
    }


def _object(digest: str, name: str | None, purpose: str) -> dict[str, Any]:
    return {
        "id": f"{FILE_PREFIX}{digest}",
        "object": "file",
        "filename": name or digest[:16],
        "purpose": purpose,
        "sha256": digest,
    }
