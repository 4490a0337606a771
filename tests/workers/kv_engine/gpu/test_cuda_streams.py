"""Each engine's thread launches on its own stream, after its weights are loaded; steps have priority."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.checks import resolve
from configs.deployment import DeploymentConfig
from models.base import EngineKind, Item, StatelessResult
from models.decoder_lm.nodes import DecoderLM
from tests.peers import together
from tests.tiny import tiny_checkpoint
from tests.workers.kv_engine.pretended_streams import Launch, PretendedStreams, Stream, pretend
from workers.kv_engine.gpu.cuda_graphs import CudaCapture
from workers.kv_engine.gpu.cuda_streams import StreamPriority, use_gpu_stream
from workers.kv_engine.outputs import TokenOutput
from workers.kv_engine.parallel import follower, lockstep
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.kv_engine.thread import EngineThread
from workers.loading import device_share, node_loading
from workers.loading.device_share import DeviceShare
from workers.loading.engines import make_follower_engine, make_kv_engines, make_stateless_nodes
from workers.settings import EngineSettings
from workers.stateless_engine.thread import StatelessThread

GPU = torch.device("cuda", 1)
CPU = torch.device("cpu")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> PretendedStreams:
    return pretend(monkeypatch)


def in_a_thread(work: Callable[[], object]) -> None:
    together([work])


def no_progress(done: int, total: int, name: str) -> None:
    """Discard the progress."""


# ---- a thread's stream ---------------------------------------------------------------------------------


def test_what_a_thread_launches_comes_behind_what_it_launched_before_and_beside_all_else(
    streams: PretendedStreams,
) -> None:
    def steps() -> None:
        streams.launch("weights")
        use_gpu_stream(GPU, StreamPriority.HIGH)
        streams.launch("step")

    def batches() -> None:
        use_gpu_stream(GPU, StreamPriority.LOW)
        streams.launch("batch")

    in_a_thread(steps)
    streams.launch("of no engine")
    in_a_thread(batches)

    weights, step, other, batch = streams.launched
    assert weights.stream is other.stream is streams.default
    assert (step.stream.device, step.behind) == (GPU, {"weights"})
    assert "step" not in other.behind | batch.behind
    assert step.stream is not batch.stream is not streams.default
    assert step.priority < batch.priority


def test_on_a_cpu_nothing_is_asked_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Stream", "current_stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("there is no CUDA"))

    use_gpu_stream(CPU, StreamPriority.HIGH)


def test_a_step_is_recorded_behind_what_was_launched_and_replayed_as_soon_as_one_that_is_not(
    streams: PretendedStreams,
) -> None:
    def steps() -> None:
        use_gpu_stream(GPU, StreamPriority.HIGH)
        streams.launch("pool")
        replay = CudaCapture(GPU).capture(lambda: streams.launch("step"))
        streams.launch("another")
        replay()

    in_a_thread(steps)

    pool, *warm_ups, another, replayed = streams.launched
    assert [(one.what, "pool" in one.behind) for one in warm_ups] == [("step", True)] * 2
    assert {one.stream for one in warm_ups}.isdisjoint({streams.default, pool.stream})
    assert (another.stream, another.behind) == (pool.stream, {"pool", "step"})
    assert (replayed.what, replayed.stream) == ("step", pool.stream)
    assert replayed.priority == pool.priority == StreamPriority.HIGH


# ---- the engines' threads ------------------------------------------------------------------------------


class Speaking:
    """A stateless node that launches what its firings are of."""

    max_batch = 4

    def __init__(self, streams: PretendedStreams) -> None:
        self._streams = streams

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        self._streams.launch("batch")
        return [StatelessResult(outputs={}) for _ in items]


@pytest.fixture
def launched(streams: PretendedStreams, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Record the launches of a rank with nodes on a simulated GPU; they run on the CPU."""
    load, forward = node_loading.load_node, DecoderLM.forward
    nodes = {EngineKind.KV: ["llm"], EngineKind.STATELESS: ["vocoder"]}

    def loading(
        config: DeploymentConfig,
        node: str,
        settings: EngineSettings,
        device: torch.device,
        *args: Any,
        **_: Any,
    ) -> Any:
        assert device == GPU
        streams.launch("weights")
        if node == "vocoder":
            return Speaking(streams)
        return load(config, node, settings, CPU, *args)

    def stepping(node: DecoderLM, *args: Any) -> torch.Tensor:
        streams.launch("step")
        return forward(node, *args)

    share = DeviceShare(device=GPU, other_ranks=(), kv_pools=1)
    monkeypatch.setattr(device_share, "of", lambda config, rank: share)
    monkeypatch.setattr(node_loading, "load_node", loading)
    monkeypatch.setattr(device_share, "nodes_of", lambda config, rank, kind: nodes[kind])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 26, 1 << 26))
    monkeypatch.setattr(DecoderLM, "forward", stepping)
    return streams.launched


def config() -> DeploymentConfig:
    return resolve(str(tiny_checkpoint("qwen3")))


def streams_of(launched: list[Launch], what: str) -> set[Stream]:
    return {one.stream for one in launched if one.what == what}


@pytest.mark.slow
async def test_steps_of_the_model_and_of_the_one_that_guesses_are_launched_on_the_threads_own_stream(
    launched: list[Launch], streams: PretendedStreams
) -> None:
    settings = EngineSettings(
        max_sequences=2, speculative_tokens=2, draft_model=str(tiny_checkpoint("qwen3"))
    )
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_outputs(outputs: Sequence[Any]) -> None:
        if any(isinstance(one, TokenOutput) and one.finish is not None for one in outputs):
            ended.set_result(None)

    thread = EngineThread(
        lambda: make_kv_engines(config(), settings, 0, no_progress)["llm"],
        on_outputs,
        lambda keys, error: ended.set_exception(error),
        on_cancelled=lambda *_: None,
    )
    await thread.start()
    proving = len(launched)
    thread.submit(SequenceSpec(key="a", prompt_ids=[5, 6, 7, 5, 6], max_tokens=4))
    await ended
    await thread.close()

    assert [one.what for one in launched[:2]] == ["weights"] * 2
    assert 2 < proving < len(launched), "both are proven, and have stepped then"
    assert streams_of(launched, "weights") == {streams.default}
    [stream] = streams_of(launched, "step")
    assert stream is not streams.default
    assert {(one.priority, "weights" in one.behind) for one in launched[2:]} == {(StreamPriority.HIGH, True)}
    assert streams.current is streams.default, "the loop's thread is none of theirs"


async def test_batches_are_launched_on_the_threads_own_stream_and_give_way(
    launched: list[Launch], streams: PretendedStreams
) -> None:
    thread = StatelessThread(lambda: make_stateless_nodes(config(), EngineSettings(), 0, no_progress))
    await thread.start()
    await thread.fire("vocoder", {}, {}, seed=0)
    await thread.close()

    weights, batch = launched
    assert (weights.stream, batch.behind) == (streams.default, {"weights"})
    assert batch.stream is not streams.default
    assert batch.priority == StreamPriority.LOW


def test_one_that_follows_steps_as_its_leader_does(
    launched: list[Launch], streams: PretendedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = SimpleNamespace(agree=lambda blocks, dtype, weights: blocks)
    monkeypatch.setattr(lockstep, "Leader", lambda line: leader)
    monkeypatch.setattr(follower, "FollowerEngine", lambda *_, **__: streams.launch("step"))
    monkeypatch.setattr("workers.kv_engine.parallel.collectives.TorchPeers", lambda *_: None)
    copy: Any = SimpleNamespace(connections=[None], rendezvous=None)

    in_a_thread(lambda: make_follower_engine(config(), EngineSettings(), 0, no_progress, copy))

    weights, step = launched
    assert (weights.stream, step.behind) == (streams.default, {"weights"})
    assert step.stream is not streams.default
    assert step.priority == StreamPriority.HIGH
