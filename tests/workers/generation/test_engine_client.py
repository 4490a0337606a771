"""Holding and resuming sequences in the engine by several holders."""

from tests.workers.harness import ByteDecoder, FakeEngine
from workers.generation.engine_client import EngineClient
from workers.generation.generated_text import GeneratedText
from workers.generation.sequence_handle import SequenceHandle
from workers.kv_engine.sequence_spec import Sampling, SequenceSpec


def submitted(key: str = "r.1.0.llm") -> tuple[EngineClient, FakeEngine, SequenceHandle]:
    rows = EngineClient()
    engine = rows.engine = FakeEngine(rows)
    row = SequenceHandle(key, GeneratedText(ByteDecoder(), max_tokens=2), None)
    sampling = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
    rows.submit(SequenceSpec(key=key, prompt_ids=[1], max_tokens=2, sampling=sampling), row)
    return rows, engine, row


async def test_a_row_that_several_hold_goes_on_when_the_last_lets_it() -> None:
    rows, engine, row = submitted()
    for holder in ("a stream", "a stream", "the output"):
        rows.hold(row.key, by=holder)
    rows.resume(row.key, by="a stream")
    assert engine.held == {row.key}
    rows.resume(row.key, by="nobody who held it")
    assert engine.held == {row.key}
    rows.resume(row.key, by="the output")

    assert not engine.held


async def test_a_row_that_is_not_in_the_engine_is_not_held_and_a_dropped_one_is_forgotten() -> None:
    rows, engine, row = submitted()
    rows.hold("another", by="a stream")
    assert not engine.held
    rows.hold(row.key, by="a stream")
    assert await rows.drop(row.key) == 1
    engine.held.clear()
    rows.resume(row.key, by="a stream")
    rows.hold(row.key, by="a stream")

    assert not engine.held
    assert not rows._holders


async def test_a_row_that_ends_while_it_is_held_leaves_nothing_held() -> None:
    rows, engine, row = submitted()
    engine.says["r"] = [65, 66]
    engine.step()
    rows.hold(row.key, by="a stream")
    engine.held.clear()  # the step that was under way still comes
    engine.step()

    assert row.ended.done()
    assert not rows._holders
