"""Two engines that take turns."""

import pytest

from models.transformers_lm.loader import load_decoder
from shared.errors import BugError
from tests.tiny import tiny_checkpoint
from tests.workers.kv_engine.engines import make_engine
from workers.kv_engine.engine_group import EngineGroup
from workers.kv_engine.outputs import TokenOutput
from workers.kv_engine.sequence_spec import SequenceSpec

PROMPT = [5, 6, 7, 8, 9]


def group() -> EngineGroup:
    """Two nodes with the same weights."""
    sizes = {"num_blocks": 8, "block_size": 8, "max_step_tokens": 16, "max_sequences": 4}
    nodes = {
        name: load_decoder(tiny_checkpoint("qwen3"), name, dtype="float32") for name in ("left", "right")
    }
    return EngineGroup({name: make_engine(node, **sizes) for name, node in nodes.items()})


def test_each_sequence_runs_on_its_node_and_the_engines_take_turns() -> None:
    both, tokens, turns = group(), dict[str, list[int]](), list[tuple[str, ...]]()
    for key, node in (("a", "left"), ("b", "right"), ("c", "right")):
        both.add(SequenceSpec(key=key, node=node, prompt_ids=PROMPT, max_tokens=4))
    assert both.hold("c")
    while both.has_work:
        for output in both.step():
            assert isinstance(output, TokenOutput)
            tokens.setdefault(output.key, []).append(output.token_id)
        turns.append(both.step_keys)

    assert turns == [("a",), ("b",)] * 4
    assert tokens["a"] == tokens["b"], "equal weights"
    stats = both.stats()
    assert (stats.running, stats.held, stats.waiting, stats.forwards) == (1, 1, 0, 8)
    assert stats.kv_total == 2 * 64
    assert stats.work.sequences == 3
    assert stats.work.step_s.count == 8
    assert stats.cache.queries == 3 * len(PROMPT)
    assert both.resume("c")
    assert both.cancel("c")
    assert not both.cancel("c")
    assert not both.feed("c", None, ended=True)
    assert both.step() == []


def test_a_sequence_of_a_node_elsewhere_is_refused() -> None:
    with pytest.raises(
        BugError, match=r"no engine of this rank runs node 'middle': it has \['left', 'right'\]"
    ):
        group().add(SequenceSpec(key="a", node="middle", prompt_ids=PROMPT, max_tokens=4))
