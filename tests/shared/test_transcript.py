"""The transcript has each valid chunk once, in order."""

import random

import msgspec
import pytest

from shared.events import OutputChunk, OutputFence, OutputTotals, TokenLogprobs
from shared.transcript import FORM, Transcript


def chunk(index: int, attempt: int = 1, text: str = "x") -> OutputChunk:
    return OutputChunk(id=f"{attempt}.{index}", index=index, attempt=attempt, text=text, token_ids=[index])


def fence(attempt: int) -> OutputFence:
    return OutputFence(attempt=attempt, reason="", history=b"")


def test_chunks_in_order_are_valid_as_they_come() -> None:
    transcript = Transcript()
    assert [transcript.fold(chunk(i)) for i in range(3)] == [[chunk(0)], [chunk(1)], [chunk(2)]]


def test_an_early_chunk_is_held_until_the_gap_closes() -> None:
    transcript = Transcript()
    assert transcript.fold(chunk(1)) == []
    assert transcript.fold(chunk(0)) == [chunk(0), chunk(1)]
    assert not transcript.track("").held


def test_a_second_copy_changes_nothing() -> None:
    transcript = Transcript()
    transcript.fold(chunk(0))
    before = transcript.totals
    assert transcript.fold(chunk(0)) == []
    assert transcript.totals == before


def test_behind_a_fence_lower_attempts_are_void_and_so_is_what_was_early() -> None:
    transcript = Transcript()
    transcript.fold(chunk(0))
    transcript.fold(chunk(2))
    assert transcript.fold(fence(2)) == []
    assert transcript.fold(chunk(1, attempt=1)) == []
    assert transcript.fold(chunk(1, attempt=2)) == [chunk(1, attempt=2)]
    assert not transcript.track("").held


def test_a_fence_of_an_attempt_that_is_over_changes_nothing() -> None:
    transcript = Transcript()
    transcript.fold(fence(3))
    transcript.fold(fence(2))
    assert transcript.attempt == 3


@pytest.mark.parametrize("seed", range(20))
def test_any_order_with_any_copies_gives_the_same_transcript(seed: int) -> None:
    chunks = [chunk(i, text=f"t{i}") for i in range(8)]
    plain = Transcript()
    for item in chunks:
        plain.fold(item)
    shuffled = chunks + random.Random(seed).choices(chunks, k=5)
    random.Random(seed).shuffle(shuffled)
    transcript = Transcript()
    assert [c for item in shuffled for c in transcript.fold(item)] == chunks
    assert transcript.totals == plain.totals


@pytest.mark.parametrize(
    "change",
    [
        {"text": "y"},
        {"token_ids": [9]},
        {"text_offset": 1},
        {"token_offset": 1},
        {"choice": 1},
        {"attempt": 2},
        {"data": b""},
        {"modality": "audio"},
        {"metadata": {"sample_rate": 24000}},
        {"metadata": {"echo": True}},
    ],
)
def test_whatever_a_client_can_see_is_in_the_digest(change: dict[str, object]) -> None:
    one, other = Transcript(), Transcript()
    one.fold(chunk(0))
    other.fold(msgspec.structs.replace(chunk(0), **change))
    assert one.totals != other.totals


def test_log_probabilities_are_a_part_of_what_was_put_out() -> None:
    def digest(logprobs: list[TokenLogprobs] | None) -> str:
        transcript = Transcript()
        transcript.fold(msgspec.structs.replace(chunk(0), logprobs=logprobs))
        return transcript.totals.digest

    told = [[TokenLogprobs(id=0, token=b"a", logprob=value)] for value in (-0.5, -0.25)]
    assert len({digest(None), digest(told[0]), digest(told[1])}) == 3
    assert digest(None) == "f263dc17029bd335305d54279fc1fe5d"


def test_every_value_of_the_metadata_is_in_the_digest_in_any_order() -> None:
    def digest(form: int = FORM, **metadata: object) -> str:
        transcript = Transcript()
        for index in range(2):
            transcript.fold(msgspec.structs.replace(chunk(index), metadata=metadata))
        return transcript.totals_of(form).digest

    assert len({digest(a=1, b=[2, 3]), digest(a=1, b=[2, 4]), digest(a=1), digest()}) == 4
    assert digest(a=1, b=2) == digest(b=2, a=1)
    assert digest(0, a=1) == digest(0) == digest()  # older logs: of what else there is, the same digest


def test_metadata_cannot_pass_for_log_probabilities() -> None:
    one, other = Transcript(), Transcript()
    one.fold(msgspec.structs.replace(chunk(0), metadata={"a": 1}))
    other.fold(msgspec.structs.replace(chunk(0), metadata={"a": 1}, logprobs=[]))
    assert one.totals != other.totals


@pytest.mark.parametrize("tracks", [("",), ("a", "b")])
def test_totals_are_compared_in_the_form_in_which_they_were_recorded(tracks: tuple[str, ...]) -> None:
    """The digests of form 0 are those that were recorded before events had the field `form`."""
    transcript, changed = Transcript(), Transcript()
    for index in range(2):
        for track in tracks:
            sound = msgspec.structs.replace(chunk(index), track=track, metadata={"sample_rate": 24000})
            transcript.fold(sound)
            changed.fold(msgspec.structs.replace(sound, metadata={"sample_rate": 8000}))
    for form in (0, 1):
        assert transcript.matches(transcript.totals_of(form))
    old = transcript.totals_of(0)
    assert old == OutputTotals(chunks=old.chunks, digest=old.digest)
    assert changed.matches(old)  # such a log says nothing of metadata
    assert not changed.matches(transcript.totals)
    assert not changed.matches(msgspec.structs.replace(transcript.totals, form=0))
