"""Snapshots of recurrent states: which are kept and found, and that answers continue from them."""

from typing import Any

import numpy as np
import pytest
import torch

from models.decoder_lm.nodes import DecoderLM, load
from tests.tiny import Family, tiny_checkpoint
from tests.workers.kv_engine.cache.test_shared_prefixes import COMMON, alone, engine, family, spec
from tests.workers.kv_engine.oracle import ids, run, tokens
from workers.kv_engine.attention.states import StateMixer
from workers.kv_engine.cache.blocks import BlockManager
from workers.kv_engine.cache.prefix_cache import PrefixCache, PrefixNode
from workers.kv_engine.cache.state_snapshots import StateSnapshots

HYBRIDS: tuple[Family, ...] = ("qwen3_next", "kimi_linear", "falcon_h1", "jamba", "mamba2", "lfm2")


def path_of(length: int) -> list[PrefixNode]:
    """Return the nodes of a cached path of so many blocks."""
    pool = BlockManager(length, 1)
    cache, path = PrefixCache(pool), list[PrefixNode]()
    for number, block in enumerate(pool.allocate(length)):
        node = cache.insert(path[-1] if path else cache.root(), (number,), block)
        assert node is not None
        path.append(node)
    return path


def keep(snapshots: StateSnapshots, node: PrefixNode) -> int:
    slot = snapshots.take()
    assert slot is not None
    snapshots.keep(node, slot)
    return slot


# ---- the slots -----------------------------------------------------------------------------------------


def test_a_path_is_usable_up_to_its_last_snapshot() -> None:
    snapshots, path = StateSnapshots(range(4)), path_of(5)
    keep(snapshots, path[0])
    keep(snapshots, path[2])

    assert snapshots.usable(path) == path[:3]
    assert snapshots.usable(path[:2]) == path[:1]
    assert snapshots.usable([]) == []


def test_a_new_snapshot_takes_the_slot_of_the_least_recently_used() -> None:
    snapshots, path = StateSnapshots(range(2)), path_of(3)
    slots = [keep(snapshots, node) for node in path[:2]]
    snapshots.pin(path[0])
    snapshots.unpin(path[0])

    assert keep(snapshots, path[2]) == slots[1]
    assert snapshots.usable(path[:2]) == path[:1]


def test_a_snapshot_that_is_to_be_read_is_not_overwritten() -> None:
    snapshots, path = StateSnapshots(range(1)), path_of(2)
    slot = keep(snapshots, path[0])
    snapshots.pin(path[0])

    assert snapshots.take() is None
    snapshots.drop(path[0])
    assert snapshots.usable(path[:1]) == path[:1]

    snapshots.unpin(path[0])
    assert snapshots.take() == slot


def test_slots_of_dropped_and_of_second_snapshots_are_free_again() -> None:
    snapshots, path = StateSnapshots(range(2)), path_of(2)
    keep(snapshots, path[0])
    keep(snapshots, path[0])
    snapshots.drop(path[0])
    snapshots.drop(path[1])

    assert snapshots.size == 0
    assert {snapshots.take(), snapshots.take()} == {0, 1}


# ---- in the engine -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest) -> DecoderLM:
    return load(tiny_checkpoint(request.param))


@pytest.fixture(scope="module")
def qwen3_5() -> DecoderLM:
    return load(tiny_checkpoint("qwen3_5"))


@pytest.mark.slow
def test_sequences_with_a_common_prefix_answer_as_each_alone(hybrid: DecoderLM) -> None:
    """The second one leaves the first one's blocks after the prefix, and keeps a snapshot there."""
    requests = family(8)
    sharing = engine(hybrid)

    found = {one.key: ids(run(sharing, [one])[one.key]) for one in requests}

    assert found == alone(hybrid, requests)
    assert sharing.stats().cache.hits == 6 * len(COMMON)


@pytest.mark.slow
def test_sequences_at_once_in_a_small_pool_are_preempted_and_answer_as_each_alone(
    qwen3_5: DecoderLM,
) -> None:
    requests = family(8, max_tokens=30, logprobs=2)
    crowded = engine(qwen3_5, num_blocks=15, state_snapshots=3)

    together = run(crowded, requests)

    assert {key: ids(outputs) for key, outputs in together.items()} == alone(qwen3_5, requests)
    assert crowded.stats().cache.preemptions > 0
    assert crowded.stats().kv_used == 0
    snapshots = crowded._scheduler._snapshots
    assert snapshots is not None
    assert len(snapshots._free) + snapshots.size == 3
    assert not snapshots._readers


def test_an_equal_prompt_continues_from_the_last_block_of_the_first(hybrid: DecoderLM) -> None:
    one = engine(hybrid)
    first = ids(run(one, [spec("a", COMMON)])["a"])

    assert ids(run(one, [spec("b", COMMON)])["b"]) == first
    assert one.stats().cache.hits == 32  # of 40: the last block is computed again, for a token to sample


def test_the_next_turn_of_a_chat_continues_from_the_answer(hybrid: DecoderLM) -> None:
    one = engine(hybrid)
    answer = ids(run(one, [spec("a", COMMON, max_tokens=17)])["a"])
    turn = spec("b", [*COMMON, *answer, 7, 8, 9])

    assert ids(run(one, [turn])["b"]) == alone(hybrid, [turn])["b"]
    assert one.stats().cache.hits == 56


def test_a_prefix_whose_snapshot_is_gone_is_computed_again(qwen3_5: DecoderLM) -> None:
    one = engine(qwen3_5, state_snapshots=2)
    other = [*range(100, 140)]
    first = ids(run(one, [spec("a", COMMON)])["a"])
    run(one, [spec("b", other)])

    assert ids(run(one, [spec("c", COMMON)])["c"]) == first
    assert one.stats().cache.hits == 0
    assert ids(run(one, [spec("d", COMMON)])["d"]) == first
    assert one.stats().cache.hits == 32


def test_without_slots_for_snapshots_nothing_is_reused(qwen3_5: DecoderLM) -> None:
    one = engine(qwen3_5, state_snapshots=0)
    requests = family(4)

    assert {one_.key: ids(run(one, [one_])[one_.key]) for one_ in requests} == alone(qwen3_5, requests)
    assert one.stats().cache.hits == 0


# ---- negative controls: an answer from another state is another answer ----------------------------------


@pytest.mark.parametrize("family_name", ["qwen3_5", "granite4_hybrid", "lfm2"])
@pytest.mark.parametrize("change", ["sources", "copies"])
def test_the_state_of_another_place_is_detected(
    family_name: Family, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either a sequence continues from an empty slot, or a snapshot is taken one token early."""
    node, text = load(tiny_checkpoint(family_name)), COMMON[:33]  # one token follows the snapshot
    one = engine(node)
    answer = ids(run(one, [spec("a", text)])["a"])
    begin = StateMixer.__init__

    def other(self: StateMixer, pool: Any, spans: Any, device: torch.device) -> None:
        if change == "sources":
            spans.states.sources[spans.states.sources > 8] = 9
        else:
            copies = spans.states.copies
            copies[copies[:, 1] > 1, 1] -= 1
        begin(self, pool, spans, device)

    if change == "copies":
        one = engine(node)
        with monkeypatch.context() as patched:
            patched.setattr(StateMixer, "__init__", other)
            run(one, [spec("a", text)])
    else:
        monkeypatch.setattr(StateMixer, "__init__", other)

    assert ids(run(one, [spec("b", text)])["b"]) != answer
    assert one.stats().cache.hits == 32


# ---- any order of events -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_answers_stay_the_same_in_any_order_of_arrivals_cancels_and_holds(
    qwen3_5: DecoderLM, seed: int
) -> None:
    """Prompts begin alike in blocks of eight, and leave one another at random places."""
    random = np.random.default_rng(seed)
    texts = [
        [*COMMON[: random.integers(8, 40)], *random.integers(0, 500, random.integers(1, 30)).tolist()]
        for _ in range(6)
    ]
    asked = [
        spec(f"{n}", texts[random.integers(6)], max_tokens=int(random.integers(1, 30))) for n in range(24)
    ]
    expected = alone(qwen3_5, asked)
    one = engine(qwen3_5, num_blocks=26, max_sequences=4, state_snapshots=int(random.integers(1, 6)))

    found: dict[str, list[int]] = {}
    live: set[str] = set()
    cancelled: set[str] = set()
    held: set[str] = set()
    waiting = list(asked)
    while waiting or one.has_work or held:
        what = random.integers(8)
        if waiting and what < 3:
            first = waiting.pop(0)
            one.add(first)
            live.add(first.key)
        if live and what == 3:
            key = str(random.choice(sorted(live)))
            one.cancel(key)
            live.discard(key)
            cancelled.add(key)
        if live and what == 4:
            key = str(random.choice(sorted(live)))
            one.hold(key)
            held.add(key)
        if held and (what > 5 or not one.has_work):
            one.resume(min(held))
            held.remove(min(held))
        for output in tokens(one.step()):
            found.setdefault(output.key, []).append(output.token_id)
            if output.finish is not None:
                live.discard(output.key)

    done = {key: answer for key, answer in expected.items() if key not in cancelled}
    assert {key: found[key] for key in done} == done
    assert len(done) > 8
    assert one.stats().cache.hits > 0
    assert one.stats().kv_used == 0
    snapshots = one._scheduler._snapshots
    assert snapshots is not None
    assert not snapshots._readers
