"""FlashInfer's plans and inputs for each step. Its kernels need a GPU and are not tested."""

import logging
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import pytest
import torch

from configs.deployment import ConfigError
from models.base import KVLayout
from models.decoder_lm.nodes import DecoderLM
from shared.errors import BugError
from tests.workers.kv_engine import flashinfer_reference as documented
from tests.workers.kv_engine.flashinfer_reference import without_a_device
from tests.workers.kv_engine.gpu.test_cuda_graphs import answers, engine, specs
from tests.workers.kv_engine.interpreted import CASES, DECODES, SCALING, Case, expected, made
from tests.workers.kv_engine.oracle import run_all
from tests.workers.kv_engine.recorder import Again, SameLaunches
from workers.kv_engine.attention import flashinfer
from workers.kv_engine.attention.flashinfer import FlashInfer, uses_tensor_cores
from workers.kv_engine.attention.kernels import PlanningKernel, choose_attention

CPU: Final = torch.device("cpu")
WRAPPERS: Final = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
Library: TypeAlias = Any


@pytest.fixture(params=["as it is documented", "its own classes"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    return documented if request.param == "as it is documented" else without_a_device(monkeypatch)


@pytest.fixture(autouse=True)
def _small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is in it here, and 128 MiB of zeros can take a virtual machine half a minute."""
    monkeypatch.setattr(flashinfer, "_MIN_WORKSPACE_BYTES", 1 << 10)


def how_of(case: Case) -> dict[str, Any]:
    return {"scaling": SCALING, "window": case.window, "softcap": case.softcap}


# ---- what it computes --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_every_token_gets_what_the_definition_of_attention_says(library: Library, name: str) -> None:
    case = CASES[name]
    step, queries, keys, values = made(case)

    out = FlashInfer(library, CPU)(queries, keys, values, step, **how_of(case))

    rounding = 2e-5 if case.dtype is torch.float32 else 5e-3
    assert (out - expected(case, step, queries, keys, values)).abs().max() < rounding


@pytest.mark.parametrize("group", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("window", [None, 24])
def test_a_recorded_step_computes_whatever_it_was_planned_for(
    library: Library, group: int, window: int | None
) -> None:
    """The recording uses padding: spans of one token in a reserved block."""
    padding = Case(shapes=((1, 1),) * len(DECODES), group=group, window=window)
    cases = [
        Case(shapes=shapes, group=group, window=window)
        for shapes in (DECODES, ((1, 64), (1, 1), (1, 17)), ((1, 1), (1, 1), (1, 80)))
    ]
    recorded = FlashInfer(library, CPU).recorded()
    step, queries, keys, values = made(padding)
    step.block_table = step.block_table.repeat(1, 5)  # as wide as sequences get
    recorded(queries, keys, values, step, **how_of(padding))

    for case in cases:
        step, queries, keys, values = made(case)
        recorded.plan(step)
        out = recorded(queries, keys, values, step, **how_of(case))
        assert (out - expected(case, step, queries, keys, values)).abs().max() < 2e-5


def test_a_plan_is_made_once_for_a_step_and_layers_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documented._Wrapper, "plans", 0)
    kernel = FlashInfer(documented, CPU)
    steps = [made(Case(shapes=DECODES)) for _ in range(2)]

    def plans_of(step: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> int:
        before = documented._Wrapper.plans
        for window in (None, 8, None, 8, None):
            kernel(queries, keys, values, step, window=window)
        return documented._Wrapper.plans - before

    assert [plans_of(*one) for one in steps] == [2, 2]


def test_a_recording_that_a_plan_no_longer_fits_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = FlashInfer(documented, CPU).recorded()
    step, queries, keys, values = made(Case(shapes=DECODES))
    recorded(queries, keys, values, step)
    recorded.plan(step)

    def planned_otherwise(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        wrapper._plan_info = [len(DECODES), 32]

    monkeypatch.setattr(documented.BatchDecodeWithPagedKVCacheWrapper, "plan", planned_otherwise)
    with pytest.raises(BugError, match=r"plans \[3, 32\] for a step that was recorded with \[3, True\]"):
        recorded.plan(step)


def test_decodes_whose_groups_the_usual_kernel_lacks_go_by_tensor_cores() -> None:
    assert {group for group in range(1, 17) if not uses_tensor_cores(group)} <= {1, 2, 3, 4, 8}


def test_memory_for_parts_of_spans_suffices_for_what_flashinfer_asks_on_an_h200() -> None:
    """By `PrefillPlan`: heads x programs x tile x (head_dim + 1) numbers of four bytes."""

    def layers(heads: int, kv_heads: int, dim: int = 128) -> Any:
        return flashinfer._LayerKind(heads, kv_heads, dim, torch.bfloat16, 16, None, None, None)

    nbytes = flashinfer._workspace_bytes
    assert nbytes(layers(32, 8), 132) == 32 * 33 * 128 * 129 * 4
    assert nbytes(layers(32, 1), 132) == 32 * 264 * 128 * 129 * 4
    assert nbytes(layers(32, 8), 132, rows=1) == 32 * 33 * 16 * 129 * 4
    assert nbytes(layers(64, 8), 132, rows=256) == 64 * (128 + 255) * 16 * 129 * 4
    assert nbytes(layers(32, 1), 132, rows=2) == 32 * 264 * 64 * 129 * 4


# ---- in an engine ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_engine_answers_the_same_by_it_recorded_or_not(library: Library, qwen3: DecoderLM) -> None:
    again = Again()

    assert isinstance(FlashInfer(library, CPU), PlanningKernel)
    found = [
        answers(run_all(engine(qwen3, capture, kernel=FlashInfer(library, CPU)), specs(12), every=2))
        for capture in (None, again)
    ]

    assert found == [answers(run_all(engine(qwen3), specs(12), every=2))] * 2
    assert again.replays > 20


@pytest.mark.slow
def test_a_replayed_step_launches_what_was_recorded_over_the_same_memory(
    qwen3: DecoderLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = SameLaunches()
    watched = recorder.watched(documented.attended)
    monkeypatch.setattr(documented._Wrapper, "compute", staticmethod(watched))

    found = run_all(engine(qwen3, recorder, kernel=FlashInfer(documented, CPU)), specs(9), every=2)

    assert answers(found) == answers(run_all(engine(qwen3), specs(9), every=2))
    assert recorder.replays > 20


# ---- availability -----------------------------------------------------------------------------


def node(**changes: Any) -> Any:
    what: dict[str, Any] = {"name": "llm", "device": torch.device("cuda"), "dtype": torch.bfloat16}
    return SimpleNamespace(**{**what, "layout": KVLayout(layers=1, kv_heads=2, head_dim=128), **changes})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Pretend that FlashInfer is installed, and that its compiler is in this folder."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("FLASHINFER_NVCC", raising=False)
    monkeypatch.setattr(flashinfer, "find_spec", {"flashinfer": True}.get)
    monkeypatch.setattr(flashinfer, "which", {"ninja": "/bin/ninja"}.get)
    stands_for_it = SimpleNamespace(__version__="0.6.13")
    monkeypatch.setattr(flashinfer, "import_module", {"flashinfer": stands_for_it}.get)
    return tmp_path


def test_where_it_is_asked_for_it_attends_and_the_log_says_so(
    installed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        kernel = choose_attention(node(), "flashinfer")

    assert isinstance(kernel, FlashInfer)
    assert kernel.device.type == "cuda"
    assert "llm: attention by FlashInfer 0.6.13 over the paged pool" in caplog.text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": CPU}, "runs on GPUs, and llm is on the CPU"),
        (
            {"dtype": torch.float32},
            "float16 and bfloat16, and llm is in torch.float32: see model_kwargs.dtype",
        ),
        (
            {"layout": KVLayout(layers=1, kv_heads=2, head_dim=80)},
            "heads of 64, 128, 256 numbers, and those of llm have 80",
        ),
        (
            {"layout": KVLayout(layers=1, kv_heads=2, head_dim=64, needs=frozenset({"sinks"}))},
            "does not compute sinks, which llm needs",
        ),
    ],
)
def test_a_node_that_it_does_not_know_is_refused(installed: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"model_kwargs.attention: flashinfer .*{why}; auto does not need it"
    ):
        choose_attention(node(**changes), "flashinfer")


def test_what_it_lacks_is_said_with_what_to_do(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (installed / "bin" / "nvcc").unlink()
    with pytest.raises(ConfigError, match="with nvcc, which was not found: install the CUDA toolkit"):
        choose_attention(node(), "flashinfer")
    monkeypatch.setattr(flashinfer, "which", lambda _: None)
    with pytest.raises(ConfigError, match="with ninja, which is not on the PATH"):
        choose_attention(node(), "flashinfer")
    monkeypatch.setattr(flashinfer, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"is not installed: pip install 'dalsegno\[flashinfer\]'"):
        choose_attention(node(), "flashinfer")


def test_where_it_cannot_be_imported_it_is_said_what_it_lacks(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'tvm_ffi'")

    monkeypatch.setattr(flashinfer, "import_module", broken)
    with pytest.raises(
        ConfigError, match=r"a dependency is missing \(No module named 'tvm_ffi'\): pip install"
    ):
        choose_attention(node(), "flashinfer")


@pytest.mark.parametrize("where", ["FLASHINFER_NVCC", "CUDA_PATH", "PATH"])
def test_its_compiler_is_found_where_it_looks(
    installed: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    nvcc = str(installed / "bin" / "nvcc")
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    found = {"ninja": "/bin/ninja", nvcc: nvcc} | ({"nvcc": nvcc} if where == "PATH" else {})
    monkeypatch.setattr(flashinfer, "which", found.get)
    if where != "PATH":
        monkeypatch.setenv(where, nvcc if where == "FLASHINFER_NVCC" else str(installed))

    assert isinstance(choose_attention(node(), "flashinfer"), FlashInfer)


def test_kernels_that_come_compiled_need_no_compiler(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer, "find_spec", {"flashinfer": True, "flashinfer_jit_cache": True}.get)
    monkeypatch.setattr(flashinfer, "which", lambda _: None)

    assert isinstance(choose_attention(node(), "flashinfer"), FlashInfer)


# ---- the reference implementation against the package --------------------------------------------------


@pytest.mark.parametrize("method", ["__init__", "plan", "run", "reset_workspace_buffer"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_its_own_classes_have_the_parameters_that_are_documented(name: str, method: str) -> None:
    library = pytest.importorskip("flashinfer", reason="an extra of its own: see docs/serving.md")

    def parameters(of: Any) -> list[tuple[str, Any, Any]]:
        found = signature(getattr(getattr(of, name), method)).parameters.values()
        # The reference names number types by strings.
        return [
            (one.name, one.kind, None if one.name.endswith("data_type") else one.default) for one in found
        ]

    assert parameters(documented) == parameters(library)
