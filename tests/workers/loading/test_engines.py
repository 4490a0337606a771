"""Engines made as the settings say."""

from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest
import torch

from configs.checks import resolve
from configs.deployment import ConfigError, NodeGroup
from models.base import EngineKind
from tests.tiny import tiny_checkpoint
from tests.workers.kv_engine import flashinfer_reference
from tests.workers.kv_engine.oracle import ids, run
from tests.workers.kv_engine.test_kv_transfer import EXPORT, Slots
from tests.workers.loading.deployments import no_progress, orpheus
from workers.cpu_kernels import library
from workers.kv_engine.attention import flashinfer
from workers.kv_engine.attention.flashinfer import FlashInfer
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.gpu import cuda_graphs
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.kv_engine.speculative.payoff import LONGEST
from workers.loading import device_share, engines, node_loading
from workers.loading.engines import make_kv_engines, make_stateless_nodes
from workers.machine import memory
from workers.settings import EngineSettings


def make_kv_engine(*args: Any, **options: Any) -> KVEngine:
    """The engine of a rank with one KV node."""
    [engine] = make_kv_engines(*args, **options).values()
    return engine


@pytest.mark.slow
def test_ranks_on_one_device_leave_each_other_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 64 * 2**20)
    config = resolve(str(tiny_checkpoint("qwen3")))
    config = msgspec.structs.replace(config, model_kwargs={"device": "cpu"})
    two = msgspec.structs.replace(
        config, node_groups=[NodeGroup(node_names=["prepare", "llm"], ranks=[0, 1])]
    )
    caplog.set_level("INFO")

    whole = make_kv_engine(config, EngineSettings(), 0, no_progress).stats().kv_total
    half = make_kv_engine(two, EngineSettings(), 1, no_progress).stats().kv_total

    assert whole // 2 - 16 <= half <= whole // 2
    assert "llm in torch.float32 on cpu, shared with rank 0; KV pool: " in caplog.text
    assert "one of 2 shares of 25% of 0.06 GiB available memory" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "tokens"), [({"kv_tokens": 40}, 48), ({}, 4 * 512), ({"max_seq_len": 100}, 4 * 100)]
)
def test_the_pool_is_as_large_as_configured_or_as_rows_can_use(
    changed: dict[str, Any], tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = msgspec.structs.replace(resolve(str(tiny_checkpoint("qwen3"))), **changed)
    engine = make_kv_engine(config, EngineSettings(max_sequences=4), 0, no_progress)

    assert engine.stats().kv_total == tokens
    assert ("longer requests are refused" in caplog.text) == (tokens < config.max_seq_len)


@pytest.mark.slow
def test_who_guesses_is_as_the_settings_say_and_the_answer_is_the_same() -> None:
    checkpoint = tiny_checkpoint("qwen3")
    config = resolve(str(checkpoint))
    spec = SequenceSpec(key="a", prompt_ids=[5, 6, 7, 5, 6, 7, 5, 6], max_tokens=20)

    def told(settings: EngineSettings) -> tuple[list[int], int]:
        engine = make_kv_engine(config, settings, 0, no_progress)
        answer = ids(run(engine, [spec])["a"])
        return answer, engine.stats().cache.accepted

    answer, stood = told(EngineSettings())
    assert stood == 0
    assert told(EngineSettings(speculative_tokens=4, draft_model=str(checkpoint))) == (answer, 15)
    assert told(EngineSettings(speculative_tokens=4))[0] == answer


@pytest.mark.slow
def test_who_attends_is_as_the_settings_say_for_the_model_and_the_one_that_guesses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = tiny_checkpoint("qwen3")
    spec = SequenceSpec(key="a", prompt_ids=[5, 6, 7, 5, 6, 7, 5, 6], max_tokens=20)
    made: list[FlashInfer] = []

    def make_kernel(node: Any) -> FlashInfer:
        made.append(FlashInfer(flashinfer_reference, node.device))
        return made[-1]

    def answer(settings: EngineSettings) -> list[int]:
        return ids(run(make_kv_engine(resolve(str(checkpoint)), settings, 0, no_progress), [spec])["a"])

    with pytest.raises(ConfigError, match="attention: flashinfer runs on GPUs, and llm is on the CPU"):
        answer(EngineSettings(attention="flashinfer"))

    expected = answer(EngineSettings())
    monkeypatch.setattr(flashinfer, "make_kernel", make_kernel)
    monkeypatch.setattr(flashinfer, "_MIN_WORKSPACE_BYTES", 1 << 10)
    settings = EngineSettings(attention="flashinfer", speculative_tokens=4, draft_model=str(checkpoint))

    assert answer(settings) == expected
    assert [one._step is not None for one in made] == [True, True], "both have attended"


@pytest.mark.parametrize(
    ("device", "settings", "has_kernel", "is_recorded"),
    [
        ("cuda:0", EngineSettings(), True, True),
        ("cuda:0", EngineSettings(cuda_graphs=False), True, False),
        ("cuda:0", EngineSettings(), False, False),
        ("cpu", EngineSettings(), True, False),
    ],
)
def test_steps_are_recorded_on_a_gpu_where_a_kernel_attends(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    settings: EngineSettings,
    has_kernel: bool,
    is_recorded: bool,
) -> None:
    monkeypatch.setattr(cuda_graphs, "CudaCapture", lambda on: ("recorded on", on))

    node: Any = SimpleNamespace(head=None, layout=SimpleNamespace(states=()))
    kernel: Any = torch.add if has_kernel else None
    capture: Any = engines._graph_capture(settings, torch.device(device), node, kernel)

    assert capture == (("recorded on", torch.device(device)) if is_recorded else None)


def test_a_rank_makes_the_nodes_that_are_placed_on_it() -> None:
    config = orpheus((["prepare", "LLM"], [0]), (["snac_decoder"], [1]))

    assert device_share.nodes_of(config, 0, EngineKind.KV) == ["LLM"]
    assert device_share.nodes_of(config, 0, EngineKind.STATELESS) == []
    assert make_stateless_nodes(config, EngineSettings(), 1, no_progress).max_batch == {"snac_decoder": 1}


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_an_engine_says_who_computes_its_layers(kernels: Literal["torch", "auto"]) -> None:
    engine = make_kv_engine(resolve("demo"), EngineSettings(kernels=kernels), 0, no_progress)

    found = library.load() if kernels == "auto" else None
    assert engine.stats().kernels == (found.variant if found is not None else "torch")


def test_keys_and_values_go_where_the_worker_says() -> None:
    slots = Slots()
    config = resolve(str(tiny_checkpoint("qwen3")))
    engine = make_kv_engine(config, EngineSettings(), 0, no_progress, export_to=slots.allocate)

    run(engine, [SequenceSpec(key="a", prompt_ids=[1, 2, 3], max_tokens=1, export=EXPORT)])

    assert slots.arrays["kv"].shape[2] == 3


@pytest.mark.parametrize(
    ("told", "kernels", "most"),
    [("auto", "auto", LONGEST), ("auto", "torch", 0), (0, "auto", 0), (3, "torch", 3)],
)
def test_tokens_are_drafted_by_default_where_results_do_not_depend_on_the_rows(
    told: Any, kernels: Any, most: int
) -> None:
    if library.load() is None and kernels == "auto":
        pytest.skip("there are no CPU kernels on this machine")
    settings = EngineSettings(speculative_tokens=told, kernels=kernels)
    [engine] = make_kv_engines(resolve("demo"), settings, 0, lambda *_: None).values()

    drafter = engine._drafter
    assert (drafter._speculative_tokens if drafter is not None else 0) == most
    assert (drafter is not None and drafter._payoff is not None) == (most == LONGEST)


def test_a_draft_model_that_is_not_used_is_told(caplog: pytest.LogCaptureFixture) -> None:
    settings = EngineSettings(draft_model=resolve("demo").checkpoint, kernels="torch")
    make_kv_engines(resolve("demo"), settings, 0, lambda *_: None)
    assert "model_kwargs.draft_model is not used for llm" in caplog.text


def test_a_draft_model_with_recurrent_states_is_refused_whoever_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if library.load() is None:
        pytest.skip("there are no CPU kernels on this machine")
    hybrid = SimpleNamespace(layout=SimpleNamespace(states=[1]), architecture="Hybrid")
    monkeypatch.setattr(node_loading, "load_draft_model", lambda *_: hybrid)
    with pytest.raises(ConfigError, match="Hybrid has recurrent states"):
        make_kv_engines(resolve("demo"), EngineSettings(draft_model="somewhere"), 0, lambda *_: None)
