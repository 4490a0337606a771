import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest
import torch

from configs.deployment import ConfigError, DeploymentConfig, NodeGroup, resolve
from models import registry
from models.base import EngineKind
from tests.peers import Circle
from tests.tiny import tiny_checkpoint
from tests.tiny.orpheus import tiny_orpheus
from tests.workers.kv_engine import flashinfer_reference
from tests.workers.kv_engine.oracle import ids, run
from tests.workers.kv_engine.shared_node import lines
from tests.workers.kv_engine.test_kv_transfer import EXPORT, Slots
from workers.cpu_kernels import library
from workers.kv_engine.attention import flashinfer
from workers.kv_engine.attention.flashinfer import FlashInfer
from workers.kv_engine.gpu import cuda_graphs
from workers.kv_engine.parallel import collectives
from workers.kv_engine.parallel.rendezvous import Rendezvous
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.loading import hosting
from workers.loading.hosting import make_follower_engine, make_kv_engine, make_stateless_nodes, nodes_of, seat
from workers.machine import memory
from workers.machine.cpu_threads import cores
from workers.machine.devices import choose_device
from workers.settings import EngineSettings
from workers.tensor_parallel.group import GroupMembership


def no_progress(done: int, total: int, name: str) -> None:
    """Nobody is told."""


def orpheus(*groups: tuple[list[str], list[int]], **changes: Any) -> DeploymentConfig:
    """Nodes on ranks, for all walks; and what else is to be another than usual."""
    node_groups = [NodeGroup(node_names=nodes, ranks=ranks) for nodes, ranks in groups]
    values: dict[str, Any] = {"model_kwargs": {"device": "cpu"}, "node_groups": node_groups}
    return DeploymentConfig(
        model="orpheus", checkpoint=str(tiny_orpheus()), max_seq_len=64, **(values | changes)
    )


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    tiny_orpheus()  # is made before: drawing its weights would look for those GPUs
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


# ---- devices -------------------------------------------------------------------------------------------


def test_each_rank_gets_a_gpu_of_its_own_as_far_as_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    config = orpheus((["LLM"], [0, 2]), (["snac_decoder"], [1]), model_kwargs={})

    assert [str(choose_device(config, rank)) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]


def test_what_is_said_of_a_rank_goes_before_what_is_said_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    config = orpheus(
        (["LLM"], [0, 2]),
        (["snac_decoder"], [1]),
        model_kwargs={"device": "cuda"},
        devices={1: "cpu", 2: "cuda:1"},
    )

    assert [str(choose_device(config, rank)) for rank in range(3)] == ["cuda:0", "cpu", "cuda:1"]


def test_without_a_gpu_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)

    assert str(choose_device(orpheus((["LLM", "snac_decoder"], [0]), model_kwargs={}), 0)) == "cpu"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": {0: "cuda:2"}}, "devices.0 is 'cuda:2', but this machine has 2 GPUs"),
        ({"model_kwargs": {"device": "cuda:3"}}, "model_kwargs.device is 'cuda:3', but this machine has 2"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    gpus(monkeypatch, 2)

    with pytest.raises(ConfigError, match=message):
        choose_device(orpheus((["LLM", "snac_decoder"], [0]), **changes), 0)


# ---- neighbours ----------------------------------------------------------------------------------------


def test_ranks_on_one_device_know_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    config = orpheus(
        (["prepare"], [5]), (["LLM"], [0, 1, 2]), (["snac_decoder"], [4]), model_kwargs={}, devices={4: "cpu"}
    )

    assert (seat(config, 0).neighbours, seat(config, 0).pools) == ((2,), 2)
    assert (seat(config, 1).neighbours, seat(config, 1).pools) == ((), 1)
    assert (seat(config, 4).neighbours, seat(config, 4).pools) == ((), 0)
    assert str(seat(config, 2)) == "cuda:0, which rank 0 computes on too"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert str(seat(config, 2)) == "cuda:0, which ranks 0, 1 compute on too"


def test_ranks_on_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "cores", lambda: 12)
    config = orpheus((["prepare"], [5]), (["LLM"], [0, 1]), (["snac_decoder"], [2]))

    assert [seat(config, rank).cores for rank in range(3)] == [4, 4, 4]
    assert seat(orpheus((["LLM", "snac_decoder"], [0])), 0).cores == 12
    monkeypatch.setattr(hosting, "cores", lambda: 2)
    assert seat(config, 0).cores == 1


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
    assert "llm in torch.float32 on cpu, which rank 0 computes on too; KV pool: " in caplog.text
    assert "one of 2 shares of 25% of 0.06 GiB available memory" in caplog.text


# ---- what is made --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "tokens"), [({"kv_tokens": 40}, 48), ({}, 4 * 512), ({"max_seq_len": 100}, 4 * 100)]
)
def test_the_pool_is_as_large_as_configured_or_as_rows_can_use(
    changed: dict[str, Any], tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = msgspec.structs.replace(resolve(str(tiny_checkpoint("qwen3"))), **changed)
    engine = make_kv_engine(config, EngineSettings(max_rows=4), 0, no_progress)

    assert engine.stats().kv_total == tokens
    assert ("longer requests are refused" in caplog.text) == (tokens < config.max_seq_len)


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
    assert told(EngineSettings(speculate=4, draft=str(checkpoint))) == (answer, 15)
    assert told(EngineSettings(speculate=4))[0] == answer


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

    with pytest.raises(ConfigError, match="attention: flashinfer is for GPUs, and llm is on the CPU"):
        answer(EngineSettings(attention="flashinfer"))

    expected = answer(EngineSettings())
    monkeypatch.setattr(flashinfer, "make_kernel", make_kernel)
    monkeypatch.setattr(flashinfer, "_LEAST_WORKSPACE_BYTES", 1 << 10)
    settings = EngineSettings(attention="flashinfer", speculate=4, draft=str(checkpoint))

    assert answer(settings) == expected
    assert [one._step is not None for one in made] == [True, True], "both have attended"


def test_a_draft_of_another_vocabulary_is_refused() -> None:
    settings = EngineSettings(speculate=4, draft=str(tiny_orpheus()))
    with pytest.raises(ConfigError, match="expected one with the same tokenizer"):
        make_kv_engine(resolve(str(tiny_checkpoint("qwen3"))), settings, 0, no_progress)


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

    kernel: Any = torch.add if has_kernel else None
    capture: Any = hosting._capture(settings, torch.device(device), kernel)

    assert capture == (("recorded on", torch.device(device)) if is_recorded else None)


def test_progress_is_told_while_weights_load() -> None:
    told: list[tuple[int, int, str]] = []
    make_kv_engine(
        resolve(str(tiny_checkpoint("qwen3"))),
        EngineSettings(),
        0,
        lambda done, total, name: told.append((done, total, name)),
    )

    assert len(told) > 5
    assert max(done for done, *_ in told) == told[0][1]
    assert {name for *_, name in told} == {"llm"}


def test_what_loading_makes_for_a_moment_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    @contextmanager
    def given_back() -> Iterator[None]:
        given.append("from here")
        yield
        given.append("to here")

    monkeypatch.setattr(memory, "given_back", given_back)
    told = msgspec.structs.replace(EngineSettings(), speculate=2, draft=resolve("demo").checkpoint)
    make_kv_engine(
        resolve("demo"), told, 0, lambda done, total, _: given.append("read") if done == total else None
    )

    assert given == ["from here", "read", "read", "to here"]  # the model, and the one that guesses for it


def test_a_rank_makes_the_nodes_that_are_placed_on_it() -> None:
    config = orpheus((["prepare", "LLM"], [0]), (["snac_decoder"], [1]))

    assert nodes_of(config, 0, EngineKind.KV) == ["LLM"]
    assert nodes_of(config, 0, EngineKind.STATELESS) == []
    assert make_stateless_nodes(config, EngineSettings(), 1, no_progress).max_batch == {"snac_decoder": 1}


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


def test_the_machine_has_a_core() -> None:
    assert cores() >= 1


# ---- nodes that are shared -----------------------------------------------------------------------------


def test_a_family_that_does_not_know_how_to_share_its_node_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Families of other packages may have been written before there was sharing."""

    def load(checkpoint: Any, node: str, *, device: Any, dtype: str, progress: Any, kwargs: Any) -> None:
        pytest.fail("it would load all of it")

    monkeypatch.setattr(registry, "face", lambda family, name: SimpleNamespace(load=load))
    monkeypatch.setattr(collectives, "TorchPeers", lambda meeting, device: Circle(2).members()[1])
    groups = [NodeGroup(node_names=["LLM", "snac_decoder"], ranks=[0, 1], tp_size=2)]
    meeting = Rendezvous(index=1, size=2, address="127.0.0.1", port=1, own_address="127.0.0.1", key="k")
    config = orpheus(node_groups=groups)

    with (
        lines() as (_, line),
        pytest.raises(
            ConfigError, match="orpheus does not know how to share 'LLM' among 2 ranks; leave tp_size away"
        ),
    ):
        make_follower_engine(config, EngineSettings(), 1, no_progress, GroupMembership(meeting, [line]))
    with pytest.raises(ConfigError, match="does not know how to share 'LLM' among 2 ranks"):
        hosting.examine(config)


def test_texts_longer_than_the_models_are_refused_also_where_its_config_says_no_length(
    tmp_path: Path,
) -> None:
    """The model's class has a length then, and configurations are read by those who do not know classes."""
    folder = tmp_path / "silent"
    copytree(tiny_checkpoint("llama"), folder)
    raw = json.loads((folder / "config.json").read_text())
    del raw["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(raw))
    config = msgspec.structs.replace(resolve("demo"), checkpoint=str(folder), max_seq_len=2048)

    assert hosting.examine(config)

    with pytest.raises(ConfigError, match=r"max_seq_len is 2049, but the model in .* was made for 2048"):
        hosting.examine(msgspec.structs.replace(config, max_seq_len=2049))


def test_a_model_without_a_kv_node_has_none_that_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "nodes_of", lambda config, rank, kind: [])

    assert not hosting.examine(orpheus((["LLM", "snac_decoder"], [0])))


def test_those_who_share_a_node_on_one_machine_leave_each_other_room() -> None:
    config = orpheus(node_groups=[NodeGroup(node_names=["LLM", "snac_decoder"], ranks=[0, 1], tp_size=2)])

    assert nodes_of(config, 1, EngineKind.KV) == ["LLM"]
    assert nodes_of(config, 1, EngineKind.STATELESS) == [], "the leader has it"
    assert (seat(config, 1).neighbours, seat(config, 1).pools) == ((0,), 2)
    assert seat(config, 1).cores == max(1, cores() // 2)
