"""Two runs of a request's nodes, and the first edge at which they part."""

from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dalsegno.bundle.bundle_file import LeftOut, digest_of
from dalsegno.replay import run_comparison
from dalsegno.replay.recorded_run import Run, run_of
from shared.events import AnyEvent, LikelyToken, OutputChunk, TokenLogprobs, WalkCompleted, decode, encode
from shared.log.port import StoredRecord
from shared.tensors import inline_ids
from tests.conductor.script import SUBJECTS, Script
from tests.dalsegno.histories import answered

StateChange = Callable[[AnyEvent], AnyEvent]


def run(records: list[StoredRecord] | None = None, left_out: dict[int, LeftOut] | None = None) -> Run:
    return run_of(records or answered(), SUBJECTS, "r1", left_out)


def changed(
    kind: type[Any], change: StateChange, records: list[StoredRecord] | None = None
) -> list[StoredRecord]:
    """The records, with each event of a kind changed."""
    return [
        msgspec.structs.replace(record, data=encode(change(event)))
        if isinstance(event := decode(record.data, record.subject.split(".")[1]), kind)
        else record
        for record in records or answered()
    ]


def told(recorded: Run, found: Run, tolerance: float | None = None) -> dict[str, str | None]:
    return {edge.name: edge.diverges for edge in run_comparison.compared(recorded, found, tolerance)}


def test_a_run_is_read_out_of_a_log() -> None:
    found = run()
    assert list(found.steps) == [0, 1]
    assert found.steps[0].after == frozenset()
    assert found.steps[1].after == {0}
    assert found.steps[1].walks == "prefill then decode"
    assert found.tokens("") == [0, 1, 2]
    assert found.text("") == "secret0secret1secret2"
    assert found.steps_before_output == 1


def test_of_several_attempts_the_one_that_counted() -> None:
    script = Script()
    script.open_epoch()
    script.join()
    script.submit("r1")
    script.run_to_the_end("r1")
    first = run(script.records)
    again = Script()
    again.open_epoch()
    again.join()
    again.submit("r1")
    again.join("w0-b")
    again.run_to_the_end("r1")
    second = run(again.records)
    assert {index: step.order.attempt for index, step in second.steps.items()} == {0: 2, 1: 2}
    assert {i: s.after for i, s in second.steps.items()} == {i: s.after for i, s in first.steps.items()}
    assert told(first, second) == dict.fromkeys(told(first, second))


def test_the_same_run_diverges_nowhere() -> None:
    found = run_comparison.compared(run(), run(), None)
    assert [edge.name for edge in found] == [
        "step 0, prepare: tensor token_ids",
        "step 0, prepare: facts",
        "tokens",
        "text",
        "step 1, decode: facts",
    ]
    assert all(edge.diverges is None and edge.compared for edge in found)


def test_a_tensor_that_differs_is_named_with_both_digests() -> None:
    def other(event: AnyEvent) -> AnyEvent:
        assert isinstance(event, WalkCompleted)
        results = [
            msgspec.structs.replace(one, outputs={name: inline_ids("k", [1, 2, 4]) for name in one.outputs})
            for one in event.results
        ]
        return msgspec.structs.replace(event, results=results)

    found = run_comparison.compared(run(), run(changed(WalkCompleted, other)), None)
    first = next(edge for edge in found if edge.diverges)
    assert first.name == "step 0, prepare: tensor token_ids"
    assert digest_of(b"\1\0\0\0\2\0\0\0\4\0\0\0") in str(first.diverges)


def test_a_tensor_whose_bytes_are_gone_is_compared_by_its_shape_and_that_is_said() -> None:
    def gone(event: AnyEvent) -> AnyEvent:
        assert isinstance(event, WalkCompleted)
        results = [
            msgspec.structs.replace(
                one,
                outputs={n: msgspec.structs.replace(h, data=None, rank=0) for n, h in one.outputs.items()},
            )
            for one in event.results
        ]
        return msgspec.structs.replace(event, results=results)

    [edge, *_] = run_comparison.compared(run(changed(WalkCompleted, gone)), run(), None)
    assert (edge.compared, edge.diverges) == (0, None)
    assert "only the shape is compared" in str(edge.note)


def scored(second: float, *, other: int | None = None) -> StateChange:
    """Chunks with log probabilities; the second token's is `second`, or it is another token."""

    def change(event: AnyEvent) -> AnyEvent:
        assert isinstance(event, OutputChunk)
        is_second = event.index == 1
        likely = [LikelyToken(id=one, token=b"", logprob=lp) for one, lp in ((1, second), (7, -0.7))]
        token = other if other is not None and is_second else event.index
        score = TokenLogprobs(id=token, token=b"", logprob=second if token == 1 else -0.7, top=likely)
        return msgspec.structs.replace(event, token_ids=[token], logprobs=[score])

    return change


def test_a_token_that_differs_is_named_with_what_the_model_thinks_of_both() -> None:
    recorded, found = (
        run(changed(OutputChunk, scored(-0.6))),
        run(changed(OutputChunk, scored(-0.8, other=7))),
    )
    diverging = told(recorded, found)
    assert diverging["tokens"] == (
        "at token 1: recorded 1, found 7; their log probabilities are -0.8 and -0.7, "
        "when recorded -0.6 and -0.7"
    )
    assert diverging["text"] is None
    first = next(edge for edge in run_comparison.compared(recorded, found, None) if edge.diverges)
    assert first.name == "tokens"


def test_what_follows_from_other_tokens_is_not_compared_and_that_is_said() -> None:
    recorded, found = (
        run(changed(OutputChunk, scored(-0.6))),
        run(changed(OutputChunk, scored(-0.6, other=7))),
    )
    notes = {edge.name: edge.note for edge in run_comparison.compared(recorded, found, None)}
    assert notes["text"] == notes["step 1, decode: facts"] == "not compared: the tokens differ"
    excused = {edge.name: edge for edge in run_comparison.compared(recorded, found, 0.2, {"": "as likely"})}
    assert (excused["tokens"].diverges, excused["tokens"].note) == (None, "as likely")


@pytest.mark.parametrize(("tolerance", "diverges"), [(None, True), (0.05, True), (0.2, False)])
def test_log_probabilities_are_equal_or_within_a_tolerance(tolerance: float | None, diverges: bool) -> None:
    recorded, found = run(changed(OutputChunk, scored(-0.6))), run(changed(OutputChunk, scored(-0.7)))
    edge = {e.name: e for e in run_comparison.compared(recorded, found, tolerance)}["log probabilities"]
    assert (edge.diverges is not None) == diverges
    if not diverges:
        assert edge.note == "differ by at most 0.1"


def test_one_answer_that_is_longer_diverges_where_the_other_ended() -> None:
    shorter = [r for r in answered() if r.seq != 10]
    assert told(run(), run(shorter))["tokens"] == "at token 2: recorded are 3 tokens, found 2"


def sounding(*samples: int) -> list[StoredRecord]:
    def change(event: AnyEvent) -> AnyEvent:
        return msgspec.structs.replace(event, modality="audio", data=array("h", samples).tobytes())

    return changed(OutputChunk, change)


@pytest.mark.parametrize(
    ("tolerance", "diverges"),
    [
        (None, "at sample 1: recorded 200, found 232"),
        (0.0001, "at sample 1: recorded 200, found 232"),
        (0.001, None),
    ],
)
def test_sound_is_compared_sample_by_sample(tolerance: float | None, diverges: str | None) -> None:
    found = {
        e.name: e
        for e in run_comparison.compared(run(sounding(100, 200)), run(sounding(100, 232)), tolerance)
    }
    assert found["audio"].diverges == diverges
    assert found["audio"].note == "samples differ by at most 0.00098 of full scale"


def test_sound_that_is_longer_diverges_within_any_tolerance() -> None:
    assert told(run(sounding(1)), run(sounding(1, 1)), 1.0)["audio"] == "at byte 6 of 6, found are 12"


def test_sound_that_was_left_out_is_compared_by_its_digests() -> None:
    def without(event: AnyEvent) -> AnyEvent:
        return msgspec.structs.replace(event, data=None)

    whole = sounding(100, 200)
    data = array("h", (100, 200)).tobytes()
    gone = {seq: LeftOut(bytes=len(data), digest=digest_of(data)) for seq in (8, 9, 10)}
    recorded = run(changed(OutputChunk, without, whole), gone)
    assert told(recorded, run(whole))["audio"] is None
    other = told(recorded, run(sounding(100, 201)))["audio"]
    assert str(other).startswith(f"at chunk 0: recorded {digest_of(data)}, found ")
    notes = {edge.name: edge.note for edge in run_comparison.compared(recorded, run(whole), None)}
    assert notes["audio"] == "the bundle has digests only; a tolerance needs --payloads"


def test_a_step_that_did_not_end_is_said() -> None:
    ended = [r for r in answered() if r.seq != 6]
    assert told(run(), run(ended))["step 0, prepare"] == "it did not finish"
