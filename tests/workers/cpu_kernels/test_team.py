"""Threads that compute together while the operating system takes the core from some of them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.workers.cpu_kernels import models
from tests.workers.cpu_kernels.libraries import NAMES, library
from tests.workers.cpu_kernels.test_decoder import engine
from tests.workers.cpu_kernels.test_library import Product
from tests.workers.kv_engine.oracle import run
from workers.cpu_kernels import compilation
from workers.cpu_kernels.decoder import NativeDecoder
from workers.cpu_kernels.library import BFLOAT16
from workers.kv_engine.sequence_spec import SequenceSpec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="says which core a thread is on")

TURNS = 20_000


@contextmanager
def on_one_core() -> Iterator[None]:
    """For this thread and the threads that it creates."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_a_thread_without_a_core_has_begun_is_done_by_another_and_comes_to_the_same_bits(
    name: str,
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(2048, 512).bfloat16(), torch.randn(24, 512)
    alone = Product(library(name), BFLOAT16, weight, threads=1)
    expected = alone(x)

    with on_one_core():
        three = Product(library(name), BFLOAT16, weight, threads=3)
        for _ in range(TURNS):
            assert torch.equal(three(x), expected)
            if three.helped > 10:
                break

    assert three.helped > 10
    alone.close()
    three.close()


@pytest.mark.slow
def test_steps_come_to_the_same_probabilities_on_a_core_that_its_threads_have_to_share() -> None:
    kernels = library(NAMES[-1])
    spec = SequenceSpec(key="", prompt_ids=list(range(5, 405)), max_tokens=20, ignore_eos=True, logprobs=5)

    def decoder(threads: int) -> NativeDecoder:
        node = models.node("qwen2", dtype=torch.bfloat16, intermediate_size=2048)
        return NativeDecoder(node, kernels, threads=threads)

    def answer(by: NativeDecoder) -> list[tuple[int, object]]:
        [found] = run(engine(by, max_step_tokens=128, prefix_cache=False), [spec]).values()
        return [(output.token_id, output.score) for output in found]

    expected = answer(decoder(threads=1))
    with on_one_core():
        crowded = decoder(threads=4)
        for _ in range(TURNS):
            assert answer(crowded) == expected
            if (helped := kernels.helped(crowded._context)) > 30:
                break

    assert helped > 30
    assert len({token for token, _ in expected}) > 5


@pytest.mark.processes
def test_a_thread_that_was_late_for_one_run_goes_through_the_next_once(tmp_path: Path) -> None:
    compiler = compilation.compiler()
    assert compiler is not None
    program, source = tmp_path / "called_twice", Path(__file__).with_name("called_twice.cpp")
    flags = ("-std=c++20", "-O1", "-pthread", f"-I{compilation.SOURCES}")
    subprocess.run(
        [compiler, *flags, str(source), "-o", str(program)], check=True, timeout=compilation.COMPILE_S
    )

    ran = subprocess.run([program], check=False, timeout=60)

    assert ran.returncode == 0
