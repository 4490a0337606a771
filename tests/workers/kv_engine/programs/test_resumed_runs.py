"""A run that goes on after a checkpoint: its contexts are computed again, and its steps are not."""

from dataclasses import replace
from typing import Final

import pytest
import torch

from tests.tiny.flowing.nodes import CHANNELS
from tests.workers.kv_engine.programs.flow import inputs_of, spec, values
from tests.workers.kv_engine.programs.test_programs import engine
from workers.data_plane.arrays import to_array
from workers.data_plane.port import Array
from workers.kv_engine.outputs import Output, ProgramOutput, ProgramReport
from workers.kv_engine.programs.spec import ProgramSpec

STEPS: Final = 17


def asked() -> ProgramSpec:
    ids, latents = inputs_of(3, tokens=9, latents=6)
    return spec("run", ids, latents, steps=STEPS)


def run(given: ProgramSpec) -> tuple[list[ProgramReport], ProgramOutput]:
    by, found = engine(), list[Output]()
    by.add_program(given)
    while by.has_work:
        found += by.step()
    *reports, output = found
    assert isinstance(output, ProgramOutput)
    return [one for one in reports if isinstance(one, ProgramReport)], output


def test_it_ends_with_the_same_bits_after_fewer_steps() -> None:
    reports, whole = run(asked())
    assert [one.progress["step"] for one in reports] == [5, 10, 15]

    for before, report in enumerate(reports, start=1):
        again, resumed = run(replace(asked(), state=report.state))

        assert [one.progress["step"] for one in again] == [5, 10, 15][before:]
        assert torch.equal(values(resumed), values(whole))


def test_another_state_matters() -> None:
    [report, *_], whole = run(asked())
    other: dict[str, Array] = {**report.state, "latents": to_array(torch.zeros(6, CHANNELS))}

    assert not torch.allclose(values(run(replace(asked(), state=other))[1]), values(whole), atol=0.01)


def test_a_state_that_does_not_fit_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    _, whole = run(asked())

    _, found = run(replace(asked(), state={"other": to_array(torch.zeros(1))}))

    assert torch.equal(values(found), values(whole))
    assert "starts from its inputs: its checkpoint cannot be used" in caplog.text
