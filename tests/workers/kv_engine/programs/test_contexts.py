"""Contexts of a program: blocks are shared by forks, and copied before one of their users writes to them."""

import numpy as np
import pytest

from models.programs import Pass
from shared.errors import BugError, ClientError
from workers.kv_engine.programs.contexts import Context, Contexts
from workers.kv_engine.programs.pages import Pages

Copies = list[tuple[str, int, int, int]]


def contexts(copies: Copies, *, blocks: int = 6, rows: int = 3, max_blocks: int = 4) -> Contexts:
    return Contexts(
        "run",
        rows=range(rows),
        pages=Pages(range(10, 10 + blocks)),
        block_size=4,
        max_blocks=max_blocks,
        copy_cells=lambda *copy: copies.append(copy),
    )


def opened(among: Contexts, name: str, *, forks: str = "") -> Context:
    asked = Pass(context=name, ids=[1], forks=forks)
    among.open(asked)
    return among.of(asked)


def committed(among: Contexts, name: str, tokens: int) -> Context:
    context = opened(among, name)
    among.make_room(context, tokens)
    context.sequence.ids = list(range(tokens))
    context.sequence.computed = tokens
    context.next_position = tokens
    context.written = np.arange(tokens, dtype=np.int32)
    return context


def test_tokens_that_are_not_committed_are_overwritten_in_the_same_blocks() -> None:
    among = contexts([])
    text = committed(among, "text", 6)

    among.make_room(text, 5)
    blocks = list(text.sequence.blocks)
    among.make_room(text, 5)

    assert blocks == text.sequence.blocks == [10, 11, 12]


def test_a_fork_shares_blocks_until_one_of_both_writes() -> None:
    copies: Copies = []
    among = contexts(copies)
    text = committed(among, "text", 6)
    among.make_room(text, 5)  # a third block, with tokens that are not committed

    fork = opened(among, "fork", forks="text")

    assert fork.sequence.blocks == [10, 11]
    assert (fork.length, fork.next_position) == (6, 6)
    among.make_room(fork, 3)
    assert copies == [("", 11, 13, 2)]
    assert fork.sequence.blocks == [10, 13, 14]
    assert text.sequence.blocks == [10, 11, 12]
    among.make_room(text, 5)
    assert copies == [("", 11, 13, 2)], "the last user of a block writes to it without a copy"


def test_a_fork_at_the_end_of_a_block_copies_nothing() -> None:
    copies: Copies = []
    among = contexts(copies)
    text = committed(among, "text", 8)

    fork = opened(among, "fork", forks="text")
    among.make_room(fork, 1)
    among.make_room(text, 1)

    assert not copies
    assert fork.sequence.blocks[:2] == text.sequence.blocks[:2] == [10, 11]
    assert fork.sequence.blocks[2] != text.sequence.blocks[2]


def test_more_than_declared_is_the_drivers_mistake() -> None:
    among = contexts([], blocks=2, rows=1)
    text = committed(among, "text", 8)

    with pytest.raises(BugError, match="max_tokens"):
        among.make_room(text, 1)
    with pytest.raises(BugError, match="max_contexts"):
        opened(among, "another")


def test_a_context_above_the_models_length_is_refused() -> None:
    among = contexts([], max_blocks=2)

    with pytest.raises(ClientError, match="9 tokens, but the model supports 8"):
        committed(among, "text", 9)


@pytest.mark.parametrize(("forks", "reason"), [("nobody", "expected one of"), ("text", "only its first")])
def test_forks_of_unknown_contexts_and_of_open_ones_are_refused(forks: str, reason: str) -> None:
    among = contexts([])
    committed(among, "text", 3)
    name = "fork" if forks == "nobody" else "text"

    with pytest.raises(BugError, match=reason):
        opened(among, name, forks=forks)


def test_a_cropped_context_writes_into_blocks_of_its_own() -> None:
    """A fork of ten cells is cropped to five: it has one whole block with its origin, and copies one cell."""
    copies: Copies = []
    among = contexts(copies, blocks=8)
    text = committed(among, "text", 10)
    fork = opened(among, "fork", forks="text")

    fork.set_length(5)
    among.make_room(fork, 6)

    assert copies == [("", 11, 13, 1)], "the third block is replaced without a copy"
    assert fork.sequence.blocks == [10, 13, 14]
    assert text.sequence.blocks == [10, 11, 12]
    assert (fork.length, fork.next_position) == (5, 5)


def test_cells_of_the_last_pass_are_kept_with_their_positions() -> None:
    among = contexts([])
    text = committed(among, "text", 3)
    text.written = np.array([0, 1, 2, 7, 8], np.int32)

    text.set_length(4)

    assert (text.length, text.next_position) == (4, 8)
    with pytest.raises(BugError, match="expected 0 to 4"):
        text.set_length(5)


def test_four_forks_of_a_started_block_have_the_room_that_their_engine_reserves() -> None:
    """Each copies the three cells of the started block: the worst case of `Programs._needs`."""
    contexts_of_run, tokens = 5, 3 + 4 * 6
    blocks = -(-tokens // 4) + 2 * (contexts_of_run - 1)
    among = contexts([], blocks=blocks, rows=contexts_of_run)
    committed(among, "text", 3)

    forks = [opened(among, str(number), forks="text") for number in range(4)]
    for fork in forks:
        among.make_room(fork, 6)

    assert all(len(fork.sequence.blocks) == 3 for fork in forks)
