"""Checkpoints in a request's output: as chunks, and folded from chunks again."""

from msgspec.structs import replace

from shared.checkpoints import CHECKPOINT, Checkpoints, State, StoredArray, contents, is_checkpoint
from shared.events import OutputChunk
from shared.output_pieces import PIECE_BYTES


def state(number: int, nbytes: int = 8) -> State:
    return {"latents": StoredArray("float32", (nbytes // 4,), bytes([number]) * nbytes)}


def chunks(place: str, of: State, attempt: int = 1) -> list[OutputChunk]:
    return [
        OutputChunk(id=f"{place}.{number}", index=-1, advisory=True, attempt=attempt, **content)
        for number, content in enumerate(contents(place, of))
    ]


def folded(given: list[OutputChunk], since: int = 0) -> dict[str, State]:
    found = Checkpoints()
    for chunk in given:
        assert is_checkpoint(chunk)
        found.fold(chunk)
    return found.states(since)


def test_the_newest_state_of_each_place_is_found() -> None:
    given = [*chunks("a", state(1)), *chunks("b", state(2)), *chunks("a", state(3))]

    assert folded(given) == {"a": state(3), "b": state(2)}


def test_a_large_state_is_several_pieces_and_counts_once_it_is_whole() -> None:
    first, second = chunks("a", state(1, 3 * PIECE_BYTES)), chunks("a", state(2, 3 * PIECE_BYTES))

    assert len(first) == 4
    assert max(len(one.data or b"") for one in first) <= PIECE_BYTES
    assert folded(first[:-1]) == {}
    assert folded([*first, *second[:-1]]) == {"a": state(1, 3 * PIECE_BYTES)}
    assert folded([*first, *second]) == {"a": state(2, 3 * PIECE_BYTES)}
    assert folded([*first[:2], *second]) == {"a": state(2, 3 * PIECE_BYTES)}


def test_a_state_with_a_missing_piece_is_none() -> None:
    whole = chunks("a", state(1, 3 * PIECE_BYTES))

    assert folded([whole[0], *whole[2:]]) == {}


def test_states_of_other_weights_are_left_out() -> None:
    assert folded(chunks("a", state(1), attempt=2), since=3) == {}
    assert folded(chunks("a", state(1), attempt=3), since=3) == {"a": state(1)}


def test_a_damaged_state_is_left_out() -> None:
    [chunk] = chunks("a", state(1))

    assert folded([replace(chunk, data=b"\xc1")]) == {}


def test_a_preview_is_no_checkpoint() -> None:
    assert not is_checkpoint(OutputChunk(id="a", index=-1, advisory=True, modality="image"))
    assert not is_checkpoint(OutputChunk(id="a", index=0, modality=CHECKPOINT))
