"""Engines that share a node give the same tokens as one engine with the whole node."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from configs.deployment import ConfigError
from models.decoder_lm.nodes import DecoderLM
from models.sequence_request import PromptPart
from tests.peers import together
from tests.tiny import Family
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import clear_text, ids, run
from tests.workers.kv_engine.recorder import Again
from tests.workers.kv_engine.shared_node import lines, parts, shared
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.gpu.cuda_graphs import Answers, GraphCapture, Replay
from workers.kv_engine.parallel.connection import GroupLostError
from workers.kv_engine.parallel.lockstep import (
    CAN_RECORD,
    Followers,
    Leader,
    RecordingSize,
    pack_step,
    unpack_step,
)
from workers.kv_engine.prompt_parts import PromptParts
from workers.kv_engine.sequence import Sequence as Row
from workers.kv_engine.sequence import Span
from workers.kv_engine.sequence_spec import Sampling, SequenceSpec
from workers.kv_engine.step import Step, StepBuilder

pytestmark = pytest.mark.processes


TOKENS = 24
SIZES: dict[str, Any] = {"num_blocks": 64, "block_size": 8, "max_step_tokens": 9, "max_sequences": 4}
CPU = torch.device("cpu")


class Knowing:
    """Guesses two tokens that come, and one that does not."""

    def __init__(self, answers: Mapping[str, list[int]]) -> None:
        self._answers = answers

    def propose(self, sequences: Sequence[Row], most: Sequence[int]) -> list[list[int]]:
        found = []
        for row, count in zip(sequences, most, strict=True):
            coming = self._answers[row.spec.key][row.generated :]
            found.append([*coming[:2], 1][:count])
        return found

    def forget(self, key: str) -> None:
        pass


@pytest.fixture(scope="module")
def halves() -> list[DecoderLM]:
    return parts("qwen3")


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_5", "kimi_linear", "deepseek_v32", "glm_dsa"])
def test_two_that_share_a_node_answer_as_generate_does(family: Family) -> None:
    """Nine tokens per step: prompts are chunked and batched with decodes."""
    texts, expected = zip(*(clear_text(family, length, TOKENS) for length in (6, 38, 66)), strict=True)
    specs = [SequenceSpec(key=str(n), prompt_ids=text, max_tokens=TOKENS) for n, text in enumerate(texts)]

    with shared(parts(family), SIZES) as engines:
        found = run(engines.leader, specs, every=3)
        forwards = engines.leader.forwards

    assert [ids(found[str(n)]) for n in range(3)] == list(expected)
    assert engines.follower.forwards == forwards > TOKENS


def test_members_that_compute_in_different_dtypes_are_told_before_they_add_anything_up() -> None:
    """Each chooses what suits its processor."""
    with lines() as (to_follower, to_leader), ThreadPoolExecutor(1) as pool:
        following = pool.submit(Leader(to_leader).agree, 5, torch.bfloat16)

        with pytest.raises(ConfigError, match=r"in torch.float32, the follower in torch.bfloat16: .*dtype$"):
            Followers([to_follower]).agree(5, torch.float32)
        to_follower.close()
        with pytest.raises(GroupLostError):
            following.result()


def test_members_that_have_loaded_different_checkpoints_restart() -> None:
    with lines() as (to_follower, to_leader), ThreadPoolExecutor(1) as pool:
        following = pool.submit(Leader(to_leader).agree, 5, torch.float32, "b" * 64)

        with pytest.raises(GroupLostError, match="weights aaaaaaaaaaaa, the follower bbbbbbbbbbbb"):
            Followers([to_follower]).agree(5, torch.float32, "a" * 64)
        to_follower.close()
        with pytest.raises(GroupLostError):
            following.result()


def test_kept_beginnings_guesses_and_draws_are_the_leaders_alone(
    halves: list[DecoderLM], qwen3: DecoderLM
) -> None:
    """The follower receives blocks only; it does not need to know about sharing or drafts."""
    text, _ = clear_text("qwen3", 38, TOKENS)
    specs = [
        SequenceSpec(key="first", prompt_ids=text * 2, max_tokens=TOKENS),
        SequenceSpec(key="again", prompt_ids=text * 2 + [7], max_tokens=TOKENS),
        SequenceSpec(
            key="drawn", prompt_ids=text, max_tokens=TOKENS, sampling=Sampling(temperature=0.9, seed=3)
        ),
    ]
    sizes = SIZES | {"max_step_tokens": 40}
    alone = make_engine(qwen3, **sizes)
    expected = {spec.key: ids(run(alone, [spec])[spec.key]) for spec in specs}

    with shared(halves, sizes | {"proposer": Knowing(expected), "speculative_tokens": 4}) as engines:
        found = {spec.key: ids(run(engines.leader, [spec])[spec.key]) for spec in specs}
        counts = engines.leader.stats().cache

    assert found == expected
    assert counts.hits > 32, "the second text began as the first"
    assert 0 < counts.accepted < counts.drafted


def test_a_follower_that_is_gone_ends_the_leaders_steps(halves: list[DecoderLM]) -> None:
    with shared(halves, SIZES) as engines:
        engines.leader.add(SequenceSpec(key="x", prompt_ids=[1, 2, 3], max_tokens=8))
        engines.leader.step()
        engines.line.close()

        with pytest.raises(GroupLostError, match="the follower is gone"):
            engines.leader.step()

    assert "the leader is gone (the connection is closed)" in str(engines.ended)


def test_a_forward_that_fails_ends_the_copy_and_not_just_its_requests(
    halves: list[DecoderLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(*_: object) -> None:
        raise MemoryError("no room")

    with lines() as (to_follower, to_leader):
        to_leader.send(bytes([False]) + CAN_RECORD.encode())
        engine = _alone_with(halves[0], Followers([to_follower]), monkeypatch)
        engine.add(SequenceSpec(key="x", prompt_ids=[1, 2, 3], max_tokens=8))
        monkeypatch.setattr(halves[0], "forward", stumble)

        with pytest.raises(
            GroupLostError, match=r"forward failed \(MemoryError: no room\), and the progress"
        ):
            engine.step()


def _alone_with(node: DecoderLM, followers: Followers, monkeypatch: pytest.MonkeyPatch) -> KVEngine:
    """A leading engine that was not proven with its followers."""
    monkeypatch.setattr("workers.kv_engine.engine.check_node", lambda *_: None)
    return make_engine(node, followers=followers, **SIZES)


def test_all_have_the_blocks_of_whom_has_room_for_the_fewest() -> None:
    with lines() as (one, to_one), lines() as (other, to_other):
        found = together(
            [
                partial(Followers([one, other]).agree, 60, torch.float32),
                partial(Leader(to_one).agree, 70, torch.float32),
                partial(Leader(to_other).agree, 50, torch.float32),
            ]
        )

    assert found == [50, 50, 50]


# ---- recorded steps --------------------------------------------------------------------------------


@pytest.mark.parametrize("answers", [(True, True, True), (True, False, True), (False, True, False)])
def test_all_members_get_the_answers_of_all(answers: tuple[bool, bool, bool]) -> None:
    with lines() as (one, to_one), lines() as (other, to_other):
        found = together(
            [
                partial(Followers([one, other]).ask, "is it", answers[0]),
                partial(Leader(to_one).ask, "is it", answers[1]),
                partial(Leader(to_other).ask, "is it", answers[2]),
            ]
        )

    assert found == [Answers(sum(answers), 3)] * 3
    assert found[0].are_all == all(answers)
    assert found[0].differ == (len(set(answers)) > 1)


@pytest.fixture
def static_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's attention pass for a kernel that can be recorded: `Again` computes anew."""
    monkeypatch.setattr("workers.kv_engine.attention.pool.PagedPool.has_static_kernel", True)


def _replayed(
    nodes: list[DecoderLM], capture: GraphCapture, follower_capture: GraphCapture | None
) -> tuple[list[list[int]], int]:
    """The answers of two that share a node, and the forwards of the follower."""
    specs = [
        SequenceSpec(key=str(n), prompt_ids=clear_text("qwen3", length, TOKENS)[0], max_tokens=TOKENS)
        for n, length in enumerate((6, 38, 66))
    ]
    sizes = SIZES | {"capture": capture, "follower_capture": follower_capture}
    with shared(nodes, sizes) as engines:
        found = run(engines.leader, specs, every=3)
    assert engines.follower.forwards == engines.leader.forwards
    return [ids(found[str(n)]) for n in range(3)], engines.leader.forwards


@pytest.mark.usefixtures("static_kernels")
def test_decodes_are_replayed_by_all_members(halves: list[DecoderLM]) -> None:
    leader, follower = Again(), Again()

    found, forwards = _replayed(halves, leader, follower)

    assert found == [clear_text("qwen3", length, TOKENS)[1] for length in (6, 38, 66)]
    assert TOKENS < follower.replays < forwards, "steps with prompts are not"
    assert leader.replays == 2 * follower.replays, "the leader samples, too"


@pytest.mark.usefixtures("static_kernels")
def test_nothing_is_recorded_if_a_member_cannot(halves: list[DecoderLM]) -> None:
    leader = Again()

    found, _ = _replayed(halves, leader, None)

    assert found == [clear_text("qwen3", length, TOKENS)[1] for length in (6, 38, 66)]
    assert leader.replays == 0


def _run_out(engine: KVEngine) -> None:
    while engine.has_work:
        engine.step()


class WithoutRoom(Again):
    """Has no memory for its first recordings."""

    def __init__(self, failing: int) -> None:
        super().__init__()
        self._failing = failing

    def capture(self, compute: Callable[[], None]) -> Replay:
        replay = super().capture(compute)
        self._failing -= 1
        if self._failing >= 0:
            raise torch.OutOfMemoryError("no room")
        return replay


@pytest.mark.usefixtures("static_kernels")
def test_a_size_that_one_member_has_no_memory_for_is_replayed_by_none(halves: list[DecoderLM]) -> None:
    leader, follower = Again(), WithoutRoom(failing=1)

    found, _ = _replayed(halves, leader, follower)

    assert found == [clear_text("qwen3", length, TOKENS)[1] for length in (6, 38, 66)]
    assert follower.replays > 0
    assert leader.replays == 2 * follower.replays


@pytest.mark.usefixtures("static_kernels")
def test_a_head_of_the_leader_without_memory_leaves_out_its_size_in_all_members(
    halves: list[DecoderLM], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The followers have computed their layers by then, and have no head that could fail."""
    head = halves[0].head

    def without_room(hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        if len(indices) == 4:  # no other step has so many
            raise torch.OutOfMemoryError("no room")
        return head(hidden, indices)

    leader, follower = Again(), Again()
    with monkeypatch.context() as changed, caplog.at_level(logging.INFO):
        changed.setattr(halves[0], "head", without_room)
        found, _ = _replayed(halves, leader, follower)

    assert found == [clear_text("qwen3", length, TOKENS)[1] for length in (6, 38, 66)]
    assert caplog.text.count("recorded steps of 1, 2 rows") == 2
    assert follower.replays > 0
    assert leader.replays == 2 * follower.replays


@pytest.mark.usefixtures("static_kernels")
def test_layers_that_one_member_alone_cannot_compute_restart_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From then on its sums would be those of other operations."""
    monkeypatch.setattr("tests.peers.PATIENCE_S", 5.0)
    nodes = parts("qwen3")
    forward, calls = nodes[1].forward, iter(range(100))

    def without_room(inputs: torch.Tensor, step: Step) -> torch.Tensor:
        states = forward(inputs, step)
        if next(calls) == 4:  # the first after the four of the self-check
            raise torch.OutOfMemoryError("no room")
        return states

    monkeypatch.setattr(nodes[1], "forward", without_room)

    with (
        pytest.raises(GroupLostError, match=r"record it \(.*\); .* frees memory: the whole group restarts"),
        shared(nodes, SIZES | {"capture": Again(), "follower_capture": Again()}),
    ):
        pass


@pytest.mark.parametrize("data", [b"", b"\1", b"\1is that", bytes(56)])
def test_an_answer_to_another_question_ends_the_group(data: bytes) -> None:
    with lines() as (to_follower, to_leader):
        to_leader.send(data)
        with pytest.raises(GroupLostError, match=f"sent {len(data)} bytes where this rank asks 'is it'"):
            Followers([to_follower]).ask("is it", True)


@pytest.mark.usefixtures("static_kernels")
def test_a_replay_that_a_member_has_not_recorded_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.peers.PATIENCE_S", 0.5)  # of the leader, in a sum
    with shared(parts("qwen3"), SIZES | {"capture": Again(), "follower_capture": Again()}) as engines:
        follower: Any = engines.follower
        follower._graphs._replays.clear()
        engines.leader.add(SequenceSpec(key="x", prompt_ids=[1, 2, 3], max_tokens=4))
        with pytest.raises(GroupLostError, match="whole group restarts"):
            _run_out(engines.leader)

    assert "replays a step of 1 rows or 0 tokens, which this rank has not recorded" in str(engines.ended)


@pytest.mark.parametrize(("rows", "tokens"), [(4, 0), (0, 16)])
def test_a_member_pads_a_replayed_step_as_its_leader_does(rows: int, tokens: int) -> None:
    def made() -> StepBuilder:
        return StepBuilder(
            max_sequences=5,
            max_step_tokens=32,
            max_blocks=6,
            block_size=4,
            device=CPU,
            padding_block=9,
            position_axes=3,
            has_long_factors=True,
        )

    leader, follower = made(), made()
    count = 1 if rows else 5
    spans = [Span(row("a", 9, [5, 2, 4], 2), 9 - count, count), Span(row("b", 6, [1, 3], 0), 5, 1)]
    spans[0].sequence.long_factors = True
    for _ in range(2):  # in the same rows of the tables
        step = leader.build(spans, rows=rows, tokens=tokens)
        received = unpack_step(bytearray(pack_step(step, RecordingSize(rows=rows, tokens=tokens))), CPU)
        follower.adopt(received, rows=rows, tokens=tokens)
        spans = [Span(row("c", 9, [6, 0, 7], 1), 9 - count, count), spans[1]]

    mine, theirs = (one.captured(rows) if rows else one.captured_prompt(tokens) for one in (leader, follower))
    for name in ("token_ids", "positions", "slots", "query_offsets", "kv_lengths", "long_factors"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
    for place, length in enumerate(mine.kv_lengths.tolist()):
        tables = [one.block_table[one.rows[place], : -(-length // 4)] for one in (mine, theirs)]
        assert torch.equal(*tables)


# ---- what a step is --------------------------------------------------------------------------------


def row(key: str, tokens: int, blocks: Sequence[int], place: int) -> Row:
    sequence = Row(SequenceSpec(key=key, prompt_ids=list(range(3, tokens + 3)), max_tokens=1))
    sequence.blocks, sequence.row = list(blocks), place
    return sequence


def test_a_step_comes_out_as_it_went_in() -> None:
    builder = StepBuilder(max_sequences=3, max_step_tokens=32, max_blocks=6, block_size=4, device=CPU)
    step = builder.build([Span(row("a", 9, [5, 2, 4], 2), 4, 5), Span(row("b", 6, [1, 3], 0), 5, 1)])

    found = unpack_step(bytearray(pack_step(step)), CPU)

    for name in ("token_ids", "positions", "slots", "query_offsets", "kv_lengths"):
        assert torch.equal(getattr(found, name), getattr(step, name)), name
    assert found.spans.block_size == 4
    assert np.array_equal(found.spans.block_tables, step.spans.block_tables[:, :3])
    assert torch.equal(
        found.block_table.index_select(0, found.rows), step.block_table.index_select(0, step.rows)[:, :3]
    )
    assert found.logit_indices.numel() == 0


def test_members_get_the_choice_of_rotary_factors() -> None:
    builder = StepBuilder(
        max_sequences=3, max_step_tokens=32, max_blocks=6, block_size=4, device=CPU, has_long_factors=True
    )
    long = row("b", 6, [1, 3], 0)
    long.long_factors = True
    step = builder.build([Span(row("a", 9, [5, 2, 4], 2), 4, 5), Span(long, 4, 2)])

    found = unpack_step(bytearray(pack_step(step)), CPU).long_factors

    assert found is not None
    assert found.tolist() == [0] * 5 + [1] * 2


def test_members_get_the_slots_of_recurrent_states() -> None:
    builder = StepBuilder(
        max_sequences=3, max_step_tokens=32, max_blocks=6, block_size=4, device=CPU, has_states=True
    )
    spans = [
        Span(row("a", 9, [5, 2, 4], 2), 0, 9, snapshots=[(4, 6), (8, 5)]),
        Span(row("b", 6, [1, 3], 0), 4, 2, snapshot=7),
        Span(row("c", 3, [0], 1), 2, 1),
    ]

    states = unpack_step(bytearray(pack_step(builder.build(spans))), CPU).spans.states

    assert states is not None
    assert (states.sources.tolist(), states.rows.tolist()) == ([-1, 7, 1], [2, 0, 1])
    assert states.copies.tolist() == [[0, 4, 6], [0, 8, 5]]


def test_members_get_the_lengths_of_prompts() -> None:
    builder = StepBuilder(
        max_sequences=3, max_step_tokens=32, max_blocks=6, block_size=4, device=CPU, has_indexers=True
    )
    step = builder.build([Span(row("a", 9, [5, 2, 4], 2), 4, 5), Span(row("b", 6, [1, 3], 0), 5, 1)])

    lengths = unpack_step(bytearray(pack_step(step)), CPU).spans.prompt_lengths

    assert lengths is not None
    assert lengths.tolist() == [9, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("full", [False, True])
def test_members_get_rows_positions_and_ranges_of_media(dtype: torch.dtype, full: bool) -> None:
    builder = StepBuilder(
        max_sequences=3, max_step_tokens=32, max_blocks=6, block_size=4, device=CPU, position_axes=3
    )
    sequence = row("a", 9, [5, 2, 4], 2)
    sequence.parts = PromptParts(
        sequence.ids,
        [PromptPart(start=3, count=4, digest="aa", full=full)],
        positions=np.arange(27, dtype=np.int32).reshape(3, 9),
        next_position=4,
        rows=torch.randn(4, 6).to(dtype),
    )
    step = builder.build([Span(sequence, 1, 8), Span(row("b", 6, [1, 3], 0), 5, 1)])

    found = unpack_step(bytearray(pack_step(step)), CPU, dtype)

    for name in ("positions", "row_values", "row_indices", "key_ends", "full_starts"):
        mine, theirs = getattr(step, name), getattr(found, name)
        assert (mine is None) == (theirs is None) == (not full and name in {"key_ends", "full_starts"})
        assert mine is None or (torch.equal(mine, theirs) and mine.dtype == theirs.dtype), name
    assert (found.spans.key_ends is None) == (not full)


@pytest.mark.parametrize("data", [b"", b"1234", bytes(64), np.arange(1, 20, dtype=np.int32).tobytes()])
def test_what_is_no_step_is_not_computed(data: bytes) -> None:
    with pytest.raises(GroupLostError, match=rf"sent {len(data)} bytes that are not a step"):
        unpack_step(bytearray(data), CPU)
