"""Admissions, for histories that are written without a conductor: who may write a request's output."""

from collections.abc import Iterable

from shared.events import Limits, Pins, RequestAdmitted
from shared.subjects import CONDUCTOR_WRITER


def admitted(
    request_id: str, lives: dict[str, int] | None = None, *, ranks: Iterable[int] = (0,), epoch: int = 1
) -> RequestAdmitted:
    """An admission of `request_id`: to `lives`, by writer; or to any life of `ranks`, as old logs have it."""
    return RequestAdmitted(
        id=f"{request_id}.admitted",
        writer=CONDUCTOR_WRITER,
        epoch=epoch,
        request_id=request_id,
        attempt=1,
        family="decoder_lm",
        seed=0,
        placement={} if lives else {f"node{rank}": rank for rank in ranks},
        lives=lives or {},
        limits=Limits(max_seq_len=128, kv_tokens=128, default_max_tokens=16),
        pins=Pins(graph="g", plan="p", config="c", core="k", submission="s"),
        reason="a test",
    )
