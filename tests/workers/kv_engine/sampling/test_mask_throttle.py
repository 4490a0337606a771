"""Sequences with slow masks take part in few steps, one at a time, and never delay others for long."""

from collections.abc import Sequence as Items
from typing import Any

from workers.kv_engine.sampling.mask_throttle import SLOW_S, MaskThrottle
from workers.kv_engine.sequence import Sequence
from workers.kv_engine.sequence_spec import Sampling, SequenceSpec


class State:
    """The part of a guide's state that the throttle reads."""

    def __init__(self, mask_s: float) -> None:
        self.mask_s = mask_s


def sequence(key: str, mask_s: float | None = None, *, tenant: str = "") -> Sequence:
    spec = SequenceSpec(
        key=key, prompt_ids=[1, 2], max_tokens=9, eos_ids=frozenset(), sampling=Sampling(), tenant=tenant
    )
    made = Sequence(spec)
    state: Any = None if mask_s is None else State(mask_s)
    made.guide_state = state
    return made


class Rig:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.served: dict[str, float] = {}
        self.throttle = MaskThrottle(lambda: self.now_s)

    def step(self, sequences: Items[Sequence]) -> str:
        """The keys of the sequences that take part in the next step."""
        left_out = self.throttle.left_out(sequences, lambda one: self.served.get(one.spec.tenant, 0))
        chosen = [one for one in sequences if one not in left_out]
        for one in chosen:
            one.ids.append(7)
        return " ".join(one.spec.key for one in chosen)


def test_usual_masks_are_not_throttled() -> None:
    rig, usual = Rig(), [sequence("plain"), sequence("quick", SLOW_S / 2), sequence("new", 0.0)]

    assert [rig.step(usual) for _ in range(3)] == ["plain quick new"] * 3


def test_beside_others_slow_masks_get_a_tenth_of_the_time_in_turn() -> None:
    rig = Rig()
    running = [sequence("plain"), sequence("a", 0.02), sequence("b", 0.03)]

    assert rig.step(running) == "plain a"
    assert rig.step(running) == "plain"
    rig.now_s += 0.19
    assert rig.step(running) == "plain"
    rig.now_s += 0.02
    assert rig.step(running) == "plain b"
    rig.now_s += 0.21
    assert rig.step(running) == "plain"
    rig.now_s += 0.1
    assert rig.step(running) == "plain a"


def test_slow_masks_alone_run_one_at_a_time_without_a_pause() -> None:
    rig, running = Rig(), [sequence("a", 0.02), sequence("b", 0.02)]

    assert [rig.step(running) for _ in range(4)] == ["a", "b", "a", "b"]
    assert rig.step([sequence("c", 0.02)]) == "c"


def test_the_tenant_that_was_served_least_comes_first() -> None:
    rig = Rig()
    rig.served = {"flood": 9.0, "other": 1.0}
    flood = [sequence(f"f{number}", 0.02, tenant="flood") for number in range(3)]

    assert rig.step([*flood, sequence("mine", 0.02, tenant="other")]) == "mine"
