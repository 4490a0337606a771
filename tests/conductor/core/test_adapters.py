"""A submission takes the adapter that its name stands for at its position in the log, and keeps it."""

import msgspec

from conductor.core.schedule import Deployment
from shared.adapters import Adapter
from shared.events import AdapterLoaded, AdapterUnloaded, NodeReady, RequestAdmitted, RequestRejected
from tests.conductor.script import SUBJECTS, Script, deployment

SERVE = deployment()
MODEL = SERVE.model
ONE = Adapter(name="sql", digest="11", folder="/one")
TWO = Adapter(name="sql", digest="22", folder="/two")
FIXED = Adapter(name="fixed", digest="33", folder="/fixed")
TAKING: Deployment = msgspec.structs.replace(SERVE, adapters={"fixed": FIXED}, takes_adapters=True)


def serving(deployment: Deployment = TAKING) -> Script:
    script = Script(serve=deployment)
    script.open_epoch()
    script.join("w0-a", 0)
    return script


def load(script: Script, adapter: Adapter) -> None:
    script.say(SUBJECTS.adapter(adapter.name), AdapterLoaded(adapter=adapter))


def test_admission_and_orders_name_the_adapter() -> None:
    script = serving()
    load(script, ONE)
    script.submit("r1", model=f"{MODEL}:sql")
    script.submit("r2", model=f"{MODEL}:fixed")
    script.submit("r3")
    assert [one.adapter for one in script.events(RequestAdmitted)] == [ONE, FIXED, None]
    assert [one.adapter for one in script.events(NodeReady)] == [ONE, FIXED, None]


def test_a_request_keeps_its_adapter_when_the_name_stands_for_another_or_for_none() -> None:
    script = serving()
    load(script, ONE)
    script.submit("r1", model=f"{MODEL}:sql")
    load(script, TWO)
    script.submit("r2", model=f"{MODEL}:sql")
    script.say(SUBJECTS.adapter("sql"), AdapterUnloaded(name="sql"))
    script.leave(0)
    script.join("w0-b", 0)  # both are resumed on the next incarnation
    found = {one.request_id: one.adapter for one in script.events(NodeReady) if one.attempt == 2}
    assert found == {"r1": ONE, "r2": TWO}


def test_a_waiting_request_keeps_the_adapter_that_it_was_submitted_with() -> None:
    script = Script(serve=TAKING)
    script.open_epoch()
    load(script, ONE)
    script.submit("r1", model=f"{MODEL}:sql")  # there is no worker yet
    script.say(SUBJECTS.adapter("sql"), AdapterUnloaded(name="sql"))
    script.join("w0-a", 0)
    assert script.last(RequestAdmitted).adapter == ONE


def test_an_adapter_that_is_not_loaded_is_a_model_that_is_not_found() -> None:
    script = serving()
    script.submit("r1", model=f"{MODEL}:sql")
    load(script, ONE)
    script.submit("r2", model="other:sql")
    script.submit("r3", model=f"{MODEL}:")
    script.say(SUBJECTS.adapter("sql"), AdapterUnloaded(name="sql"))
    script.submit("r4", model=f"{MODEL}:sql")
    assert [one.failure.code for one in script.events(RequestRejected)] == ["model_not_found"] * 4


def test_a_deployment_without_adapters_ignores_those_in_its_log() -> None:
    script = serving(SERVE)
    load(script, ONE)
    script.submit("r1", model=f"{MODEL}:sql")
    assert script.last(RequestRejected).failure.code == "model_not_found"
