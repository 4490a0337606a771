"""`python -m benchmarks.beside`: what is measured computes, and goes on; a GPU that is not there is said."""

import asyncio
import sys

import pytest
import torch

from benchmarks import beside
from benchmarks.gpu import NO_GPU
from workers.data_plane.arrays import to_array
from workers.kv_engine.outputs import Output
from workers.stateless_engine.thread import StatelessThread

CPU = torch.device("cpu")


def test_without_a_gpu_it_says_so_and_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["beside", "--device", "cuda"])

    with pytest.raises(SystemExit) as end:
        beside.main()

    assert end.value.code == NO_GPU
    assert "nothing was measured" in capsys.readouterr().err


@pytest.mark.slow
async def test_decodes_go_on_for_as_long_as_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, answers = 3, 4
    monkeypatch.setattr(beside, "_LAYERS", 1)
    monkeypatch.setattr(beside, "_ANSWER", answer)
    bench, are_many = beside._Bench(CPU), asyncio.Event()
    ended: list[str] = []
    tell = bench.engine._on_outputs

    def on_outputs(outputs: list[Output]) -> None:
        tell(outputs)
        ended.extend(output.key for output in outputs if output.finish is not None)
        if len(ended) >= answers:
            are_many.set()

    monkeypatch.setattr(bench.engine, "_on_outputs", on_outputs)
    await bench.engine.start()
    async with bench.decoding():
        await are_many.wait()
    await bench.engine.close()

    assert len(set(ended)) == len(ended) >= answers
    assert bench.tokens >= answer * answers


async def test_a_vocoder_makes_sound_of_latents() -> None:
    thread = StatelessThread(lambda: beside._nodes(CPU, is_low_priority=True))
    await thread.start()

    fired = await thread.fire("vocoder", {"latents": to_array(torch.zeros(768, 2))}, {}, seed=0)
    await thread.close()

    assert fired.outputs["audio"].shape == (1, 2 * 8 * 8 * 4 * 2)
