"""Cutting of prompt echoes, and their scores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.events import LikelyToken, OutputChunk, TokenLogprobs, encode
from tests.workers.harness import told_of
from workers.generation import prompt_echo
from workers.generation.prompt_echo import EchoPiece, ScoredEcho, echo_pieces, token_logprobs


def bytes_of(token_id: int) -> bytes:
    return b"<%d>" % token_id


def ids_of(cut: list[EchoPiece]) -> list[int]:
    return [id for piece in cut for id in piece.content["metadata"]["token_ids"]]


def test_a_prompt_of_usual_size_is_one_piece() -> None:
    assert echo_pieces([5, 6, 7], "abc", None) == [
        EchoPiece(0, 3, {"text": "abc", "metadata": {"echo": True, "token_ids": [5, 6, 7]}})
    ]


@given(
    ids=st.lists(st.integers(0, 9), min_size=1, max_size=300),
    text=st.text(max_size=300),
    top=st.none() | st.integers(0, 20),
)
def test_however_long_it_is_its_pieces_put_together_are_the_prompt(
    ids: list[int], text: str, top: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prompt_echo, "_MAX_TOKENS", 50)
        patched.setattr(prompt_echo, "_MAX_CHARS", 40)
        patched.setattr("workers.generation.output_chunks.MAX_CHUNK_LOGPROBS", 100)
        cut = echo_pieces(ids, text, top)

    assert "".join(piece.content["text"] for piece in cut) == text
    assert ids_of(cut) == ids
    assert [piece.start for piece in cut] == [0, *(piece.end for piece in cut[:-1])]
    assert max(len(piece.content["text"]) for piece in cut) <= 40
    assert max(piece.end - piece.start for piece in cut) <= (50 if top is None else 100 // (1 + top))


def test_a_piece_with_the_most_log_probabilities_fits_an_event() -> None:
    """The limit is NATS's default payload of 1 MB."""
    ids = list(range(150_000, 160_000))
    first, *others = echo_pieces(ids, "x" * 10_000, 20)
    waiting = ScoredEcho([first, *others], lambda token_id: b"a token of many bytes")

    waiting.begin(ids[0])
    chunks = waiting.push(told_of(id, 20) for id in ids[1:])

    assert len(chunks) == len(others) + 1
    assert max(len(encode(OutputChunk(**chunk))) for chunk in chunks) < 500_000


def test_a_piece_goes_out_once_its_last_token_is_scored() -> None:
    cut = [EchoPiece(0, 2, {"text": "ab"}), EchoPiece(2, 4, {"text": "cd"})]
    waiting = ScoredEcho(cut, bytes_of)

    assert waiting.begin(5) == []
    assert waiting.push([told_of(6, 1)]) == [
        {
            "text": "ab",
            "logprobs": [
                TokenLogprobs(id=5, token=b"<5>"),
                TokenLogprobs(
                    id=6, token=b"<6>", logprob=-0.75, top=[LikelyToken(id=6, token=b"<6>", logprob=0.0)]
                ),
            ],
        }
    ]
    assert waiting.push([told_of(7, 0)]) == []
    assert not waiting.complete
    [last] = waiting.push([told_of(8, 0)])
    assert [told.id for told in last["logprobs"]] == [7, 8]
    assert waiting.complete


def test_a_piece_that_was_put_out_before_is_counted_and_not_told() -> None:
    waiting = ScoredEcho([EchoPiece(2, 4, {"text": "cd"})], bytes_of)

    waiting.begin(5)
    [last] = waiting.push(told_of(id, 0) for id in (6, 7, 8))

    assert [told.id for told in last["logprobs"]] == [7, 8]


def test_a_prompt_of_one_token_has_nothing_to_wait_for() -> None:
    waiting = ScoredEcho(echo_pieces([5], "a", 3), bytes_of)

    [only] = waiting.begin(5)

    assert only["logprobs"] == [TokenLogprobs(id=5, token=b"<5>")]
    assert waiting.complete


def test_a_score_is_spelt_with_the_bytes_of_its_tokens() -> None:
    assert token_logprobs(told_of(4, 2), bytes_of) == TokenLogprobs(
        id=4,
        token=b"<4>",
        logprob=-0.5,
        top=[
            LikelyToken(id=4, token=b"<4>", logprob=0.0),
            LikelyToken(id=5, token=b"<5>", logprob=-0.125),
        ],
    )
