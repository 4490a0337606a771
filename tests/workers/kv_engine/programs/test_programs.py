"""Programs in the engine: their results are those of a naive oracle, alone, packed, and beside sequences."""

from typing import Any, Final

import pytest
import torch

from shared.errors import BugError, ClientError
from tests.workers.cpu_kernels.libraries import NAMES, library
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import ids as ids_of
from tests.workers.kv_engine.programs.flow import flow_node, inputs_of, oracle, spec, values
from workers.cpu_kernels.decoder import NativeDecoder
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.outputs import Output, ProgramOutput, StepFailedError
from workers.kv_engine.programs.spec import ProgramSpec
from workers.kv_engine.sequence_spec import SequenceSpec

SIZES: Final[dict[str, Any]] = {
    "num_blocks": 200,
    "block_size": 8,
    "max_step_tokens": 64,
    "max_sequences": 16,
}
REQUESTS: Final = {str(n): inputs_of(n, tokens=3 + 5 * n % 23, latents=5 + 3 * n % 11) for n in range(20)}


def engine(*, native: bool = True, **options: Any) -> KVEngine:
    node: Any = flow_node()
    if native:
        node = NativeDecoder(node, library(NAMES[-1]), threads=1)
    return make_engine(node, **{**SIZES, **options})


def serve(
    by: KVEngine, specs: list[ProgramSpec | SequenceSpec], *, every: int = 0
) -> dict[str, list[Output]]:
    """All outputs by key; with `every`, one request arrives in every so many steps."""
    found: dict[str, list[Output]] = {one.key: [] for one in specs}
    waiting, steps = list(specs), 0
    while waiting or by.has_work:
        while waiting and (not every or steps % every == 0):
            one = waiting.pop(0)
            if isinstance(one, ProgramSpec):
                by.add_program(one)
            else:
                by.add(one)
            if every:
                break
        for output in by.step():
            found[output.key].append(output)
        steps += 1
    return found


def texts(count: int) -> list[SequenceSpec]:
    return [
        SequenceSpec(key=f"text {n}", prompt_ids=[n + 1, 7, 9, 11], max_tokens=12, ignore_eos=True)
        for n in range(count)
    ]


@pytest.mark.parametrize("native", [True, False])
def test_twenty_at_once_are_each_as_the_oracle_says(native: bool) -> None:
    node = flow_node()

    found = serve(engine(native=native), [spec(key, *given) for key, given in REQUESTS.items()])

    for key, given in REQUESTS.items():
        [output] = found[key]
        torch.testing.assert_close(values(output), oracle(node, *given), atol=2e-3, rtol=2e-3)


def test_staggered_among_texts_no_bit_changes() -> None:
    alone = {key: serve(engine(), [spec(key, *given)])[key] for key, given in list(REQUESTS.items())[:6]}
    only_texts = serve(engine(), list(texts(4)))
    programs = [spec(key, *REQUESTS[key]) for key in alone]
    mixed: list[ProgramSpec | SequenceSpec] = [*texts(4)]
    for place, one in enumerate(programs):
        mixed.insert(2 * place, one)

    found = serve(engine(max_pass_tokens=30), mixed, every=2)

    for key, [output] in alone.items():
        assert torch.equal(values(found[key][0]), values(output))
    for key, outputs in only_texts.items():
        assert ids_of(found[key]) == ids_of(outputs)


def test_a_causal_flow_would_be_another_result() -> None:
    ids, latents = REQUESTS["3"]
    node = flow_node()

    difference = oracle(node, ids, latents) - oracle(node, ids, latents, is_causal=True)

    assert float(difference.abs().max()) > 0.02


def test_passes_of_many_runs_share_a_forward() -> None:
    by = engine()

    serve(by, [spec(key, *given, steps=4) for key, given in list(REQUESTS.items())[:8]])

    assert by.forwards == 2 + 4  # eight runs of two contexts fill the sixteen rows


def test_a_pass_above_the_budget_is_refused_alone() -> None:
    by = engine(max_pass_tokens=12)
    fitting, large = inputs_of(1, tokens=4, latents=12), inputs_of(2, tokens=4, latents=13)
    by.add_program(spec("fits", *fitting))
    by.add_program(spec("large", *large))
    errors, outputs = dict[str, Exception](), list[Output]()

    while by.has_work:
        try:
            outputs += by.step()
        except StepFailedError as failed:
            errors.update(failed.others)
            outputs += failed.outputs

    assert isinstance(errors["large"], ClientError)
    assert errors["large"].code == "pass_too_long"
    assert "13 tokens" in str(errors["large"])
    assert "max_pass_tokens" in str(errors["large"])
    assert [output.key for output in outputs] == ["fits"]


def test_a_drivers_mistake_fails_its_run_alone() -> None:
    by = engine()
    wrong, right = inputs_of(1, tokens=4, latents=6), inputs_of(2, tokens=4, latents=6)
    by.add_program(spec("wrong", [1, 10**6, 2], wrong[1]))
    by.add_program(spec("right", *right))
    errors, outputs = dict[str, Exception](), list[Output]()

    while by.has_work:
        try:
            outputs += by.step()
        except StepFailedError as failed:
            errors.update(failed.others)
            outputs += failed.outputs

    assert "expected them below" in str(errors["wrong"])
    assert [output.key for output in outputs] == ["right"]


def test_a_run_that_can_never_fit_is_refused_at_once() -> None:
    by = engine(num_blocks=4)

    with pytest.raises(ClientError, match="KV cache"):
        by.add_program(spec("0", *inputs_of(1, tokens=30, latents=8)))

    assert not by.has_work


def test_an_unknown_program_is_named() -> None:
    with pytest.raises(BugError, match=r"no program 'float'.*\['flow'\]"):
        engine().add_program(ProgramSpec(key="0", program="float", inputs={}, args={}, seed=0))


def test_a_cancelled_run_gives_its_room_back() -> None:
    by = engine()
    ids, latents = REQUESTS["1"]
    free = by.stats().kv_used
    by.add_program(spec("0", ids, latents))
    by.step()
    assert by.stats().kv_used > free

    assert by.cancel("0")

    assert by.stats().kv_used == free
    assert not by.has_work
    assert [output.key for output in serve(by, [spec("1", ids, latents)])["1"]] == ["1"]


def test_runs_wait_for_room_and_no_later_text_passes_them() -> None:
    """Two rows: a text runs, a run waits for both rows, and the second text waits for the run."""
    by = engine(max_sequences=2)
    first, second = texts(2)
    order: list[str] = []
    by.add(first)
    by.step()
    by.add_program(spec("flow", *REQUESTS["1"]))
    by.add(second)

    while by.has_work:
        order += [output.key for output in by.step() if isinstance(output, ProgramOutput) or output.finish]

    assert order == [first.key, "flow", second.key]
    assert by.stats().waiting == 0
