"""OpenAI's batch object."""

from typing import Any, Final

from gateway.batches.live import LiveBatches
from gateway.batches.state import BatchState
from gateway.media.sources import FILE_PREFIX
from gateway.requests.usage import input_output_usage

_TIMES: Final = (
    "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled",
)  # fmt: skip


def batch_object(state: BatchState, live: LiveBatches) -> dict[str, Any]:
    """The batch object.

    Of a running batch, the counts include the lines of segments that are not stored; `usage` does not.
    """
    created, ended = state.created, state.ended
    assert created is not None, "a batch that is shown was created"
    completed, failed = state.completed, state.failed
    beat = live.beats.get(state.id)
    if beat is not None and ended is None and beat.owner == state.owner:
        completed, failed = max(completed, beat.completed), max(failed, beat.failed)
    problems = [] if ended is None else ended.problems
    return {
        "id": state.id,
        "object": "batch",
        "endpoint": created.endpoint,
        "errors": _errors([{"code": one.code, "message": one.message} for one in problems]),
        "input_file_id": f"{FILE_PREFIX}{created.input}",
        "completion_window": created.window,
        "status": state.status,
        "output_file_id": None if ended is None else _file_id(ended.output),
        "error_file_id": None if ended is None else _file_id(ended.errors),
        "created_at": created.created_s,
        "expires_at": created.expires_s,
        **{f"{name}_at": state.times_s.get(name) for name in _TIMES},
        "model": min(state.models) if len(state.models) == 1 else None,
        "usage": None if (usage := state.usage) is None else input_output_usage(usage),
        "request_counts": {"total": state.lines or 0, "completed": completed, "failed": failed},
        "metadata": created.metadata or None,
    }


def _file_id(digest: str | None) -> str | None:
    return None if digest is None else f"{FILE_PREFIX}{digest}"


def _errors(problems: list[dict[str, str]]) -> dict[str, Any] | None:
    if not problems:
        return None
    return {"object": "list", "data": [{**one, "line": None, "param": None} for one in problems]}
