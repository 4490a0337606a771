"""Recorded runs of token programs: where they may be resumed, and the output of a stopped one."""

from dalsegno.replay.recorded_run import Run
from shared.events import OutputChunk


def run(*chunks: tuple[str, list[int]]) -> Run:
    return Run(
        tracks={
            "": [
                OutputChunk(id=str(n), request_id="r", attempt=1, index=n, text=text, token_ids=ids)
                for n, (text, ids) in enumerate(chunks)
            ]
        }
    )


def test_a_program_is_resumed_after_the_chunk_of_a_differing_token() -> None:
    recorded = run(("echo", []), ("abcd", [1, 2, 3, 4]), ("ef", [5, 6]))

    assert [recorded.boundary_after("", place) for place in range(6)] == [4, 4, 4, 4, 6, 6]


def test_output_is_cut_like_that_of_a_stopped_run() -> None:
    recorded = run(("echo", []), ("abcd", [1, 2, 3, 4]))
    found = run(("echo", []), ("ab", [1, 2]), ("cdef", [3, 4, 5, 6]))

    found.cut_like(recorded, "")

    assert (found.text(""), found.tokens("")) == ("echoabcd", [1, 2, 3, 4])


def test_a_run_that_generated_less_stays_as_it_is() -> None:
    recorded, found = run(("abcd", [1, 2, 3, 4])), run(("ab", [1, 2]))

    found.cut_like(recorded, "")

    assert (found.text(""), found.tokens("")) == ("ab", [1, 2])
