from typing import Any

import msgspec
import pytest

from conductor.core.schedule import Deployment
from configs.deployment import DeploymentConfig, SchedulingSettings
from dalsegno.config import resolve
from dalsegno.gate.deployments import Deployments
from dalsegno.gate.recorded_decisions import Epoch, RecordedDecisions


def config(**changes: Any) -> DeploymentConfig:
    found = resolve.effective("demo", (), with_weights=False).config
    return msgspec.structs.replace(found, **changes)


def recorded(one: DeploymentConfig) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(one.recorded))
    return data


def test_a_stored_configuration_is_the_deployment_that_was_served() -> None:
    busy = config(scheduling=SchedulingSettings(max_waiting=3, replicas="rr"), max_concurrent_requests=2)
    found = Deployments({busy.digest: recorded(busy)}).of(busy.digest)
    assert isinstance(found, Deployment)
    assert (found.max_waiting, found.replicas, found.max_concurrent_requests) == (3, "rr", 2)
    assert found.family == "decoder_lm"


def test_a_configuration_without_scheduling_is_used_only_if_that_was_the_default() -> None:
    usual, busy = config(), config(scheduling=SchedulingSettings(max_waiting=3))
    old = {one.digest: recorded(one) for one in (usual, busy)}
    for one in old.values():
        del one["scheduling"]
    assert isinstance(Deployments(old).of(usual.digest), Deployment)
    assert "without scheduling" in str(Deployments(old).of(busy.digest))


@pytest.mark.parametrize("digest", ["", "0" * 32])
def test_an_unknown_configuration_is_said_to_be_unknown(digest: str) -> None:
    assert "--config" in str(Deployments({"1": None}).of(digest))


def test_a_damaged_configuration_is_a_reason_and_no_error() -> None:
    assert "cannot be used here" in str(Deployments({"1": {"model": 3}}).of("1"))


def test_another_configuration_takes_the_place_of_all() -> None:
    busy = config(max_concurrent_requests=2)
    found = Deployments({}, busy)
    assert found.of("anything") is found.of("")
    assert len(found.used) == 1


def test_an_epoch_without_an_admission_has_the_configuration_of_the_one_before() -> None:
    first, second = config(max_concurrent_requests=2), config(max_concurrent_requests=3)
    epochs = {number: Epoch(epoch=number, conductor=f"c{number}", seq=number) for number in (1, 2, 3, 4)}
    epochs[2].configs.append(first.digest)
    epochs[4].configs.append(second.digest)
    known = {one.digest: recorded(one) for one in (first, second)}
    found = Deployments(known).of_epochs(RecordedDecisions(epochs))
    most = {
        number: one.max_concurrent_requests for number, one in found.items() if isinstance(one, Deployment)
    }
    assert most == {1: 2, 2: 2, 3: 2, 4: 3}
