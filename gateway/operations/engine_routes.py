"""`/v1/engine/stats` and `/v1/engine/health`: the engines of the deployment in dfastllm's words.

The numbers are those of `/metrics` and `/health`: answers of this gateway since its start, and sequences of
all workers by their heartbeats.
"""

import time
from typing import Any, Final

from fastapi import APIRouter

from gateway.meters.answers import FINISHED
from gateway.operations.metrics import Snapshot
from gateway.requests.relay import REQUEST_CANCELLED
from gateway.requests.response import DISCONNECTED
from gateway.requests.service import Gateway

_TIMEOUT: Final = "deadline_exceeded"
_NOT_FAILED: Final = (FINISHED, DISCONNECTED, REQUEST_CANCELLED, _TIMEOUT)
_HEALTH: Final = {"ready": "healthy", "busy": "healthy", "draining": "degraded"}
"""The status of each engine state in which requests are answered; others are unhealthy."""
_UNHEALTHY: Final = "unhealthy"


def engine_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(prefix="/v1/engine", tags=["metrics"])

    @router.get("/stats", summary="Answers, tokens and forward passes since the gateway's start")
    async def stats() -> dict[str, Any]:
        return engine_stats(gateway, Snapshot(gateway, None, time.monotonic()))

    @router.get("/health", summary="The state of the engines, always with 200")
    async def health() -> dict[str, Any]:
        found = engine_health(await gateway.health(), Snapshot(gateway, None, time.monotonic()))
        return found | {"uptime_seconds": _uptime_s(gateway)}

    return router


def engine_stats(gateway: Gateway, snapshot: Snapshot) -> dict[str, Any]:
    """Return the document of `/v1/engine/stats`.

    `avg_tokens_per_step` is tokens per forward pass of answers of diffusion language models, and otherwise
    tokens per engine step. `counts` are the sums of what the model counts (`Usage.counts`).
    """
    meter = gateway.meter
    outcomes = dict.fromkeys((FINISHED, _TIMEOUT), 0)
    for (_, outcome), number in meter.outcomes.items():
        outcomes[outcome] = outcomes.get(outcome, 0) + number
    latencies = [one.request_s for one in meter.latency.values()]
    finished = sum(one.count for one in latencies)
    return {
        "requests_processed": outcomes[FINISHED],
        "requests_failed": sum(n for name, n in outcomes.items() if name not in _NOT_FAILED),
        "requests_timeout": outcomes[_TIMEOUT],
        "tokens_generated": meter.generated_tokens,
        "avg_latency_ms": 1e3 * sum(one.sum for one in latencies) / finished if finished else 0.0,
        "avg_tokens_per_step": _tokens_per_step(gateway, snapshot),
        "current_queue_size": _waiting(snapshot),
        "counts": dict(meter.counts),
        "uptime": _uptime_s(gateway),
        "server": {
            "uptime": _uptime_s(gateway),
            "total_requests": sum(outcomes.values()) + gateway.in_flight.count,
            "active_requests": gateway.in_flight.count,
        },
    }


def engine_health(health: dict[str, Any], snapshot: Snapshot) -> dict[str, Any]:
    """Return the document of `/v1/engine/health`, without the time; `health` is that of `/health`."""
    state = health["state"]
    fresh = [one for one in snapshot.workers if one.is_fresh]
    return {
        "status": _HEALTH.get(state, _UNHEALTHY),
        "state": "error" if state == "degraded" else state,
        "model_loaded": bool(fresh) and all(one.state == "ready" for one in fresh),
        "queue_size": _waiting(snapshot),
        "missing": health["missing"],
        "engines": {one.name: one.state for one in snapshot.workers if one.is_fresh},
    }


def _tokens_per_step(gateway: Gateway, snapshot: Snapshot) -> float:
    meter = gateway.meter
    if meter.forwards:
        return meter.diffusion_tokens / meter.forwards
    fresh = [one for one in snapshot.workers if one.is_fresh and one.meters]
    steps = sum(one.number("steps") for one in fresh)
    return sum(one.meters.sampled_tokens for one in fresh) / steps if steps else 0.0


def _waiting(snapshot: Snapshot) -> int:
    """The sequences that wait for room in a batch, and the requests that wait for their admission."""
    conductors = [one for one in snapshot.conductors if one.is_fresh and one.state == "leading"]
    workers = [one for one in snapshot.workers if one.is_fresh]
    return int(sum(one.number("waiting") for one in (*conductors, *workers)))


def _uptime_s(gateway: Gateway) -> float:
    return round(time.time() - gateway.started_s, 3)
