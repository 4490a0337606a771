"""Pooled outputs, cut into chunks and joined again."""

from typing import Any

import numpy as np
import pytest

from shared.events import OutputChunk
from workers.data_plane.port import Array
from workers.generation.prompt_output import MAX_PIECE_BYTES, array_chunks, fully_released_array


def states(tokens: int, size: int, seed: int = 0) -> Array:
    found = np.random.default_rng(seed).standard_normal((tokens, size), np.float32)
    return Array(dtype="float32", shape=found.shape, data=found.reshape(-1).view(np.uint8))


def released(contents: list[dict[str, Any]]) -> list[OutputChunk]:
    return [
        OutputChunk(id=str(place), writer="w0", request_id="r", index=place, **content)
        for place, content in enumerate(contents)
    ]


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_states_are_cut_between_tokens_and_say_where_they_begin(tokens: int) -> None:
    array = states(tokens, 1024)

    contents = [*array_chunks(array, [])]

    assert all(len(one["data"]) <= MAX_PIECE_BYTES for one in contents)
    assert [one["metadata"]["first"] for one in contents] == [*range(0, tokens, 64)]
    assert [one["metadata"]["shape"][1] for one in contents] == [1024] * len(contents)
    assert {one["modality"] for one in contents} == {"hidden_states"}
    assert b"".join(one["data"] for one in contents) == array.data.tobytes()


def test_a_state_that_is_longer_than_a_piece_is_one() -> None:
    contents = [*array_chunks(states(3, MAX_PIECE_BYTES), [])]

    assert [one["metadata"]["shape"] for one in contents] == [[1, MAX_PIECE_BYTES]] * 3


def test_an_embedding_is_one_chunk_and_says_nothing_of_tokens() -> None:
    vector = states(1, 8)
    [content] = array_chunks(Array(dtype="float32", shape=(8,), data=vector.data), [])

    assert content == {
        "modality": "embedding",
        "data": vector.data.tobytes(),
        "metadata": {"dtype": "float32", "shape": [8]},
    }
    known = fully_released_array(released([content]), tokens=99)
    assert known is not None
    assert (known.shape, known.data.tobytes()) == ((8,), content["data"])


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_what_was_released_stands_and_the_rest_is_computed_anew(kept: int) -> None:
    """The last bits of a state may depend on the other sequences of its batch."""
    first, again = [*array_chunks(states(200, 1024, seed=1), [])], states(200, 1024, seed=2)
    stands = released(first[:kept])

    assert fully_released_array(stands, tokens=200) is None
    contents = [*array_chunks(again, stands)]

    assert contents[:kept] == first[:kept]
    assert contents[kept:] == [*array_chunks(again, [])][kept:]


def test_states_that_are_all_released_are_not_computed_again() -> None:
    array = states(200, 1024)

    known = fully_released_array(released([*array_chunks(array, [])]), tokens=200)

    assert known is not None
    assert (known.dtype, known.shape) == ("float32", (200, 1024))
    assert known.data.tobytes() == array.data.tobytes()
