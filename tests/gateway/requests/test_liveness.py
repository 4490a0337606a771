import subprocess
import sys

import msgspec
import pytest

from gateway.requests.liveness import FRESH_S, Liveness
from tests.gateway.world import beat, deployment


def said(state: str, **facts: object) -> bytes:
    return msgspec.msgpack.encode({"state": state, **facts})


def all_ready() -> Liveness:
    liveness = Liveness(ranks=[0, 1])
    liveness.receive("ds.beat.conductor.c-1", said("leading"), 100.0)
    liveness.receive("ds.beat.worker.0", said("ready"), 100.0)
    liveness.receive("ds.beat.worker.1", said("ready"), 100.0)
    return liveness


class TestPresence:
    def test_nothing_is_missing_when_all_have_spoken(self) -> None:
        assert all_ready().missing(100.0 + FRESH_S - 0.1, log_answers=True) == []

    def test_what_beats_say_for_the_meters_is_not_shown(self) -> None:
        liveness = Liveness(ranks=[0])
        liveness.receive("ds.beat.worker.0", said("ready", steps=3, meters={"sequences": 1}), 100.0)

        shown = liveness.overview(100.0, log_answers=True, is_draining=False)["workers"]["0"]
        assert shown == {"state": "ready", "steps": 3, "silent_s": 0.0}

    def test_silence_is_missed(self) -> None:
        assert len(all_ready().missing(100.0 + FRESH_S, log_answers=True)) == 3

    def test_a_log_that_does_not_answer_is_missed(self) -> None:
        assert all_ready().missing(100.0, log_answers=False) == ["the log does not answer"]

    @pytest.mark.parametrize(
        ("subject", "payload", "missing"),
        [
            ("ds.beat.conductor.c-1", said("following"), "no conductor leads"),
            ("ds.beat.worker.1", said("loading", progress=0.41), "the worker of rank 1 is loading (41%)"),
            ("ds.beat.worker.0", said("draining"), "the worker of rank 0 is draining"),
        ],
    )
    def test_who_is_not_ready_is_named(self, subject: str, payload: bytes, missing: str) -> None:
        liveness = all_ready()
        liveness.receive(subject, payload, 101.0)

        assert liveness.missing(101.0, log_answers=True) == [missing]

    @pytest.mark.parametrize(
        ("subject", "payload"),
        [
            ("ds.beat.worker.7", said("ready")),
            ("ds.beat.worker.x", said("ready")),
            ("ds.beat.worker", said("ready")),
            ("ds.beat.worker.0", b"\xff"),
            ("ds.beat.worker.0", b"\x01"),
        ],
    )
    def test_what_is_no_beat_of_ours_is_passed_over(self, subject: str, payload: bytes) -> None:
        liveness = Liveness(ranks=[0])
        liveness.receive(subject, payload, 1.0)

        assert not liveness.workers
        assert not liveness.every_worker_was_ready

    def test_it_is_loading_until_all_was_ready_once_and_degraded_after(self) -> None:
        liveness = Liveness(ranks=[0])

        def status(now_s: float) -> object:
            return liveness.overview(now_s, log_answers=True, is_draining=False)["status"]

        assert status(0.0) == "loading"
        liveness.receive("ds.beat.conductor.c", said("leading"), 1.0)
        liveness.receive("ds.beat.worker.0", said("ready"), 1.0)
        assert status(1.0) == "healthy"
        assert status(9.0) == "degraded"

    def test_the_state_tells_where_in_its_life_a_deployment_is(self) -> None:
        liveness = Liveness(ranks=[0])

        def state(now_s: float, *, is_draining: bool = False, running: int = 0) -> tuple[object, object]:
            shown = liveness.overview(now_s, log_answers=True, is_draining=is_draining, running=running)
            return shown["state"], shown["workers"].get("0", {}).get("state")

        assert state(0.0) == ("uninitialized", None)
        liveness.receive("ds.beat.worker.0", said("loading", progress=0.5), 1.0)
        assert state(1.0) == ("loading", "loading")
        liveness.receive("ds.beat.conductor.c", said("leading"), 2.0)
        liveness.receive("ds.beat.worker.0", said("ready", running=0, waiting=0), 2.0)
        assert state(2.0) == ("ready", "ready")
        assert state(2.0, running=1) == ("busy", "ready")
        liveness.receive("ds.beat.worker.0", said("ready", running=0, waiting=3), 2.0)
        assert state(2.0) == ("busy", "busy")
        assert state(2.0, is_draining=True, running=1) == ("draining", "busy")
        assert state(9.0) == ("degraded", "busy")

    def test_of_several_conductors_that_say_they_lead_the_last_epoch_counts(self) -> None:
        liveness = Liveness(ranks=[0])

        def states() -> dict[str, str]:
            shown = liveness.overview(0.0, log_answers=True, is_draining=False)["conductors"]
            return {name: one["state"] for name, one in shown.items()}

        liveness.receive("ds.beat.conductor.c-1", said("leading", epoch=3), 0.0)
        liveness.receive("ds.beat.conductor.c-2", said("following", epoch=3), 0.0)
        assert states() == {"c-1": "leading", "c-2": "following"}
        liveness.receive("ds.beat.conductor.c-2", said("leading", epoch=4), 0.0)
        assert states() == {"c-1": "deposed", "c-2": "leading"}
        liveness.receive(
            "ds.beat.conductor.c-1", said("leading", epoch=3), 0.0
        )  # it was stopped, and wakes up
        assert states() == {"c-1": "deposed", "c-2": "leading"}
        liveness.receive("ds.beat.conductor.c-1", said("following", epoch=4), 0.0)
        assert states() == {"c-1": "following", "c-2": "leading"}

    def test_a_conductor_that_leaves_in_order_is_missed_at_once(self) -> None:
        liveness = Liveness(ranks=[])
        liveness.receive("ds.beat.conductor.c-1", said("leading", epoch=3), 0.0)
        assert liveness.missing(0.0, log_answers=True) == []
        liveness.receive("ds.beat.conductor.c-1", said("leaving", epoch=3, led=True), 0.0)
        assert liveness.missing(0.0, log_answers=True) == ["no conductor leads"]
        assert liveness.conductors == {}

    def test_conductors_of_the_past_are_forgotten(self) -> None:
        liveness = Liveness(ranks=[0])
        for life in range(100):
            liveness.receive(f"ds.beat.conductor.c-{life}", said("leading"), 10.0 * life)

        assert len(liveness.conductors) < 10


async def test_live_answers_before_there_is_a_log() -> None:
    async with deployment(worker_joined=False) as world:
        world.server.stop()
        live = await world.client.get("/health/live")
        ready = await world.client.get("/health/ready")
        health = await world.client.get("/health")

    assert (live.status_code, live.json()) == (200, {"status": "live"})
    assert ready.status_code == 503
    assert int(ready.headers["retry-after"]) > 0
    assert health.status_code == 200
    assert health.json()["status"] == "loading"
    assert "the log does not answer" in health.json()["missing"]


async def test_ready_needs_the_log_a_leader_and_every_worker() -> None:
    async with deployment() as world:
        steps = []
        beat(world, "conductor", "c-1", "leading", epoch=3)
        steps.append((await world.client.get("/health/ready")).status_code)
        beat(world, "worker", "0", "loading", progress=0.5)
        steps.append((await world.client.get("/health/ready")).status_code)
        beat(world, "worker", "0", "ready", steps=12)
        ready = await world.client.get("/health/ready")
        world.server.stop()
        steps.append((await world.client.get("/health/ready")).status_code)

    assert steps == [503, 503, 503]
    assert ready.status_code == 200
    state = ready.json()
    assert (state["status"], state["missing"], state["model"]) == ("healthy", [], "demo")
    assert state["workers"]["0"]["steps"] == 12
    assert state["conductors"]["c-1"]["epoch"] == 3


async def test_beats_on_the_log_are_heard() -> None:
    async with deployment(worker_joined=False) as world:
        first = await world.client.post("/generate", json={"text": "a"})
        world.server.broadcast(world.subjects.heartbeat("worker", "0"), said("ready"))
        await world.until(lambda: world.gateway.liveness.every_worker_was_ready)
        second = await world.client.post("/generate", json={"text": "a"})

    assert (first.status_code, second.status_code) == (503, 200)


@pytest.mark.processes
def test_the_gateway_imports_neither_torch_nor_a_tokenizer() -> None:
    code = (
        "import sys, gateway.app; "
        "print(sorted(set(sys.modules) & {'torch', 'transformers', 'tokenizers', 'numpy', 'jinja2'}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "[]"
