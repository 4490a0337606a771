"""Tests of the pure `Chunker`; `OutputStream` is mostly tested with the executor."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.events import LikelyToken, OutputChunk, TokenLogprobs, encode
from shared.log.port import PayloadTooLargeError
from shared.transcript import Transcript
from workers.generation.output_chunks import (
    COALESCE_S,
    MAX_CHUNK_TOKENS,
    Chunker,
    OutputState,
    OutputStream,
)


def chunker(state: OutputState | None = None) -> Chunker:
    return Chunker(state or OutputState(), request_id="r", attempt=1)


def cut(from_: Chunker, now_s: float) -> OutputChunk:
    chunk = from_.peek()
    from_.take(chunk, now_s)
    return chunk


def test_nothing_is_due_while_nothing_waits() -> None:
    empty = chunker()

    assert empty.due_s() is None
    empty.add(1, "a", 5.0)
    cut(empty, 5.0)
    assert empty.due_s() is None


def test_the_first_text_is_due_at_once_and_later_text_is_coalesced() -> None:
    chunks = chunker()
    chunks.add(1, "a", 5.0)
    assert chunks.due_s() == 0.0
    cut(chunks, 5.0)
    chunks.add(2, "b", 5.001)
    assert chunks.due_s() == 5.0 + COALESCE_S


def test_tokens_without_text_wait_and_the_first_text_does_not_wait_for_them() -> None:
    chunks = chunker()
    chunks.add(1, "", 5.0)
    assert chunks.due_s() == 5.0 + COALESCE_S
    cut(chunks, 5.02)
    chunks.add(2, "a", 5.021)
    assert chunks.due_s() == 0.0


@pytest.mark.slow
@given(
    pieces=st.lists(st.tuples(st.integers(0, 9), st.text(max_size=3), st.booleans()), max_size=30),
)
def test_however_it_is_cut_chunks_follow_on_one_another(pieces: list[tuple[int, str, bool]]) -> None:
    state = OutputState()
    chunks, cuts = chunker(state), []
    for token, text, cuts_here in pieces:
        chunks.add(token, text, 1.0)
        if cuts_here:
            cuts.append(cut(chunks, 1.0))
    while chunks.pending:
        cuts.append(cut(chunks, 1.0))

    text, tokens = "", list[int]()
    transcript = Transcript()
    for place, chunk in enumerate(cuts):
        assert (chunk.index, chunk.text_offset, chunk.token_offset) == (place, len(text), len(tokens))
        text, tokens = text + chunk.text, tokens + chunk.token_ids
        transcript.fold(chunk)
    assert text == "".join(piece[1] for piece in pieces)
    assert tokens == [piece[0] for piece in pieces]
    assert len({chunk.id for chunk in cuts}) == len(cuts)
    assert chunks.totals == transcript.totals


def test_what_is_only_looked_at_changes_nothing() -> None:
    chunks = chunker()
    chunks.add(1, "a", 0.0)

    assert chunks.peek() == chunks.peek()
    assert chunks.totals.chunks == 0


def test_a_long_backlog_is_cut_to_size() -> None:
    chunks = chunker()
    for token in range(MAX_CHUNK_TOKENS + 1):
        chunks.add(token, "x", 0.0)

    assert [len(cut(chunks, 0.0).text), len(cut(chunks, 0.0).text)] == [MAX_CHUNK_TOKENS, 1]


def told(token: int, top: int = 0) -> TokenLogprobs:
    likely = [LikelyToken(id=n, token=b"l", logprob=-1.0) for n in range(top)]
    return TokenLogprobs(id=token, token=b"t", logprob=-0.5, top=likely)


@pytest.mark.slow
@given(cuts=st.lists(st.booleans(), min_size=1, max_size=60), top=st.integers(0, 20))
def test_log_probabilities_stay_with_their_tokens_however_it_is_cut(cuts: list[bool], top: int) -> None:
    chunks, found = chunker(), []
    for token, cuts_here in enumerate(cuts):
        chunks.add(token, "x", 1.0, told(token, top))
        if cuts_here:
            found.append(cut(chunks, 1.0))
    while chunks.pending:
        found.append(cut(chunks, 1.0))

    assert [chunk.token_ids for chunk in found] == [[t.id for t in chunk.logprobs or []] for chunk in found]
    assert [id for chunk in found for id in chunk.token_ids] == list(range(len(cuts)))


def test_a_backlog_with_many_log_probabilities_is_cut_into_smaller_chunks() -> None:
    chunks = chunker()
    for token in range(400):
        chunks.add(token, "x", 0.0, told(token, 20))

    found = [cut(chunks, 0.0) for _ in range(3)]

    assert [len(chunk.token_ids) for chunk in found] == [195, 195, 10]
    assert max(len(encode(chunk)) for chunk in found) < 250_000


def test_tokens_without_log_probabilities_have_none() -> None:
    chunks = chunker()
    chunks.add(1, "a", 0.0)

    assert chunks.peek().logprobs is None


def test_a_chunk_of_its_own_goes_before_the_tokens_that_wait_and_they_are_still_the_first_text() -> None:
    chunks = chunker()
    chunks.add(1, "", 5.0)
    chunks.add_content({"text": "echo", "metadata": {"echo": True}})
    assert chunks.due_s() == 0.0
    assert cut(chunks, 5.0).text == "echo"
    assert chunks.due_s() == 5.0 + COALESCE_S
    chunks.add(2, "a", 5.001)
    assert chunks.due_s() == 0.0
    last = cut(chunks, 5.001)

    assert (last.index, last.text_offset, last.token_offset, last.token_ids) == (1, 4, 0, [1, 2])


def test_every_chunk_says_of_which_choice_it_is() -> None:
    chunks = Chunker(OutputState(), request_id="r", attempt=1, choice=3)
    chunks.add_content({"text": "echo"})
    chunks.add(1, "a", 0.0)

    assert [cut(chunks, 0.0).choice, cut(chunks, 0.0).choice] == [3, 3]


async def test_a_piece_that_the_log_will_never_take_is_told_to_who_waits_for_it() -> None:
    def post(chunk: OutputChunk, stored: Callable[[int], None]) -> None:
        if chunk.data:
            raise PayloadTooLargeError("an event of 9000000 bytes is too large for the log")
        stored(1)

    stream = OutputStream(chunker(), post)
    stream.add(1, "a", last=True)
    stream.add_content({"modality": "audio", "data": bytes(9)})
    with pytest.raises(PayloadTooLargeError):
        await stream.wait_stored()
    await stream.wait_for_room()  # nobody is held for what goes nowhere


def emit(chunks: Chunker, count: int) -> None:
    chunks.add_emission(list(range(count)), ["x"] * count, 0.0)


@pytest.mark.parametrize(
    ("emissions", "cut_into"),
    [
        ([8, 8, 8], [24]),
        ([600, 600, 8], [600, 608]),
        ([MAX_CHUNK_TOKENS + 76, 8], [MAX_CHUNK_TOKENS + 76, 8]),
        ([1, 1, MAX_CHUNK_TOKENS, 1], [2, MAX_CHUNK_TOKENS, 1]),
    ],
)
def test_an_emission_is_in_one_chunk(emissions: list[int], cut_into: list[int]) -> None:
    chunks = chunker()
    for count in emissions:
        emit(chunks, count)

    assert [len(cut(chunks, 0.0).token_ids) for _ in cut_into] == cut_into
    assert not chunks.pending


def test_the_largest_emission_fits_the_log() -> None:
    chunks = chunker()
    chunks.add_emission([200_000] * 8192, ["sixteen letters "] * 8192, 0.0)

    assert len(encode(cut(chunks, 0.0))) < 2**19
