"""The process of trials outlives hostile grammars, starts again when it is lost, and ends with its owner."""

import gc
import json
import os
import signal

import pytest

from models.text import trial_process
from models.text.trial_process import TrialProcess
from shared.errors import CapacityError

pytestmark = pytest.mark.processes
NO_FORCING = '%llguidance {"no_forcing": true}\n'


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f"{NO_FORCING}{text}"}]})


def pid_of(trials: TrialProcess) -> int:
    assert trials._process is not None
    return trials._process.pid


def test_one_process_tries_grammar_after_grammar_and_measures_each() -> None:
    trials = TrialProcess(["<|call|>"])
    good = trials.verdict_of(lark('start: <|call|> "a"'))
    pid = pid_of(trials)
    deep = trials.verdict_of(
        lark("\n".join(["start: r0", *(f"r{n}: r{n + 1}" for n in range(6000)), 'r6000: "a"']))
    )
    bad = trials.verdict_of(lark("start: <|other|>"))

    assert (good["error"], good["ended_by"]) == ("", 0)
    assert 0 < good["cpu_s"] < 1
    assert deep["ended_by"] in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
    assert "unknown special token" in bad["error"]
    assert pid_of(trials) == pid
    trials.close()


def test_a_lost_process_fails_one_trial_and_is_started_again() -> None:
    trials = TrialProcess([])
    trials.verdict_of(lark('start: "a"'))
    os.kill(pid_of(trials), signal.SIGKILL)

    with pytest.raises(CapacityError, match=r"could not be tried: .*; try again later") as caught:
        trials.verdict_of(lark('start: "a"'))

    assert (caught.value.code, caught.value.status) == ("guide_not_tried", 503)
    assert trials.verdict_of(lark('start: "a"'))["error"] == ""
    trials.close()


def test_a_trial_that_gets_no_processor_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = TrialProcess([])
    trials.verdict_of(lark('start: "a"'))
    os.kill(pid_of(trials), signal.SIGSTOP)
    monkeypatch.setattr(trial_process, "_WALL_S", 0.01)

    with pytest.raises(CapacityError, match=r"did not end within 0.01 s, because the processors are busy"):
        trials.verdict_of(lark('start: "a"'))

    trials.close()


def test_the_process_ends_with_its_owner() -> None:
    trials = TrialProcess([])
    trials.verdict_of(lark('start: "a"'))
    process = trials._process
    assert process is not None

    del trials
    gc.collect()

    assert process.returncode == -signal.SIGKILL
