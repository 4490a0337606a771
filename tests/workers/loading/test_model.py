"""What a rank loads: the engines its nodes need, and none else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from configs.deployment import ConfigError, DeploymentConfig
from models import registry
from models.base import ChunkOf, Processing
from models.orpheus.frames import FIRST_AUDIO, WINDOW_TOKENS
from shared.errors import BugError
from tests.peers import Circle
from tests.workers.kv_engine.shared_node import lines
from tests.workers.loading.deployments import orpheus
from workers import settings
from workers.data_plane.port import Array
from workers.generation.engine_client import EngineClient
from workers.kv_engine.parallel import collectives
from workers.kv_engine.parallel.connection import GroupLostError
from workers.kv_engine.parallel.lockstep import CAN_RECORD, Leader
from workers.kv_engine.parallel.rendezvous import Rendezvous
from workers.loading.model import PROCESSING_MEMBERS, Loaded, LocalModel
from workers.machine import read_ahead
from workers.stateless_engine.nodes import StatelessNodes
from workers.tensor_parallel.group import GroupMembership

ALL = orpheus((["prepare", "LLM", "snac_decoder"], [0]))
APART = orpheus((["prepare"], [0]), (["LLM"], [1]), (["snac_decoder"], [2]))


@asynccontextmanager
async def loaded(config: DeploymentConfig, rank: int) -> AsyncIterator[tuple[LocalModel, Loaded]]:
    model = LocalModel(config, settings.of(config), rank)
    try:
        async with asyncio.timeout(60):
            yield model, await model.load(EngineClient())
    finally:
        await model.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "rank", "engines"),
    [(ALL, 0, "kv and stateless"), (APART, 0, ""), (APART, 1, "kv"), (APART, 2, "stateless")],
)
async def test_a_rank_has_the_engines_of_its_nodes(config: DeploymentConfig, rank: int, engines: str) -> None:
    async with loaded(config, rank) as (model, found):
        assert (found.engine is not None) == ("kv" in engines)
        assert (found.kv_tokens > 0) == ("kv" in engines)
        assert (found.stateless is not None) == ("stateless" in engines)
        assert (model.counters() is not None) == ("kv" in engines)
        assert (model.progress, found.device) == (1.0, "cpu")
        assert found.processing.eos_ids


@pytest.mark.parametrize(("rank", "reads"), [(0, False), (2, True)])
async def test_a_rank_reads_weights_ahead_if_it_has_any(
    rank: int, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    monkeypatch.setattr(read_ahead, "begin", read.append)
    async with loaded(APART, rank):
        assert read == [Path(APART.checkpoint)] * reads


async def test_a_stateless_node_fires() -> None:
    codes = FIRST_AUDIO + np.arange(WINDOW_TOKENS, dtype=np.int32) % 7 * 4096
    tokens = Array(dtype="int32", shape=(WINDOW_TOKENS,), data=codes.astype(np.int32).view(np.uint8))
    chunk = ChunkOf(number=0, fresh=WINDOW_TOKENS, last=True)
    async with loaded(APART, 2) as (_, found):
        assert found.stateless is not None
        fired = await found.stateless.fire("snac_decoder", {"token": tokens}, {}, seed=1, chunk=chunk)

    audio = fired.outputs["audio"]
    assert isinstance(audio, Array)
    assert (audio.dtype, audio.shape) == ("int16", (4 * 2048,))
    assert audio.data.any()


@pytest.mark.slow
async def test_progress_goes_over_all_nodes_and_never_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    said = LocalModel._on_progress

    def noted(self: LocalModel, done: int, total: int, node: str) -> None:
        said(self, done, total, node)
        seen.append(self.progress)

    monkeypatch.setattr(LocalModel, "_on_progress", noted)
    async with loaded(ALL, 0):
        pass

    assert seen == sorted(seen)
    assert seen[0] > 0.5  # SNAC was first; the language model tells of its tensors
    assert seen[-1] == 1.0


@pytest.mark.parametrize("member", PROCESSING_MEMBERS)
async def test_processing_without_a_required_member_is_refused_by_name(
    member: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {name: () for name in PROCESSING_MEMBERS if name != member}
    module = SimpleNamespace(load=lambda checkpoint, *, max_seq_len: SimpleNamespace(**given))
    registry.graph("orpheus")  # cached, so only `processing` is asked for below
    monkeypatch.setattr(registry, "module", lambda family, name: module)

    with pytest.RaisesGroup(
        pytest.RaisesExc(ConfigError, match=f"family orpheus: .* has no {member}: .*docs/adding-a-model.md")
    ):
        async with loaded(APART, 0):
            pass


def test_the_required_members_are_those_of_the_protocol() -> None:
    assert {*PROCESSING_MEMBERS} == {name for name in vars(Processing) if not name.startswith("_")}


@pytest.mark.slow
async def test_the_death_of_either_engine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object) -> None:
        raise BugError("it died")

    monkeypatch.setattr(StatelessNodes, "run", dies)
    async with loaded(ALL, 0) as (model, found), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(waited(model))
        assert found.stateless is not None
        with pytest.raises(Exception, match="has died"):
            await found.stateless.fire("snac_decoder", {}, {}, seed=0)
        assert await waiting == "it died"


async def waited(model: LocalModel) -> str:
    try:
        await model.wait()
    except BugError as error:
        return error.message
    return "nothing"


@pytest.mark.processes
async def test_a_member_that_is_gone_ends_the_wait_though_nothing_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collectives, "TorchPeers", lambda meeting, device: Circle(1).members()[0])
    config = orpheus((["prepare", "LLM", "snac_decoder"], [0]))
    meeting = Rendezvous(index=0, size=2, address="127.0.0.1", port=1, own_address="127.0.0.1", key="k")
    with lines() as (to_follower, follower):
        following: list[asyncio.Task[None]] = []

        async def gather() -> GroupMembership:
            following.append(asyncio.create_task(asyncio.to_thread(follow)))
            return GroupMembership(meeting, [to_follower])

        def follow() -> None:
            """Agree to all the leader says, and go."""
            assert model._weights is not None
            weights = model._weights.digest_of("LLM")
            follower.send((10_000).to_bytes(8, "little") + f"torch.float32 {weights}".encode())
            follower.receive()
            Leader(follower).ask(CAN_RECORD, False)

        model = LocalModel(config, settings.of(config), 0, gather=gather)
        loading = asyncio.create_task(model.load(EngineClient()))
        await loading
        await following[0]
        waiting = asyncio.create_task(model.wait())
        follower.close()

        with pytest.raises(GroupLostError, match="the follower is gone"):
            await waiting
        await model.close()
