"""An answer that is interrupted at every chunk boundary, and twice: it is the answer that nobody interrupts.

Compared is all a client can see (text, tokens, log probabilities, where each stands), what the request used,
and how it ended. The engine is pretended here: it says the same for the same prefix. That the real one does,
with its penalties, seeds and log probabilities, is `tests.workers.test_end_to_end`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import pytest

from shared.events import OutputChunk, OutputTotals, WalkCompleted, encode
from shared.transcript import Transcript
from tests.workers import harness
from tests.workers.harness import EMISSION, EOS, SUBJECTS, Rig, chat, ready, rigged

SAYS: Final = "Grüße. Two wizards: 7 → 9!"


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked, and what the model says to it."""

    args: dict[str, Any]
    says: Sequence[int] = (*SAYS.encode(), EOS)


CASES: Final[dict[str, Case]] = {
    "to the model's end": Case({}),
    "to the length, in the middle of a character": Case({"max_tokens": 3}),
    "past the model's end": Case({"ignore_eos": True, "max_tokens": 34}, [*SAYS.encode(), EOS, *b" more"]),
    "to a stop string": Case({"stop": ["wizards:"]}),
    "to a stop string that almost came before": Case({"stop": ["e. Two wizards: 8", "e. Two wizards: 7"]}),
    "to a stop string inside of a character's neighbours": Case({"stop": ["7 → 9"]}),
    "with a stop string that never comes, shown at the end": Case({"stop": ["9!?"]}),
    "to a stop token": Case({"stop_token_ids": [ord(":")]}),
    "with log probabilities": Case({"logprobs": 3}),
    "with log probabilities to a stop string": Case({"logprobs": 0, "stop": ["Two w"]}),
    "behind an echo": Case({"echo": "The prompt."}),
    "behind an echo with log probabilities": Case({"echo": "The prompt.", "logprobs": 2}),
    "as one of several choices": Case({"choice": 2, "logprobs": 1, "stop": ["9"]}),
    "with all of it": Case({"choice": 1, "logprobs": 2, "echo": "The prompt.", "stop": ["zards: 7"]}),
}


PROGRAMS: Final[dict[str, Case]] = {
    "to the model's end": Case({}),
    "to the length within an emission": Case({"max_tokens": 6}),
    "to a stop string within an emission": Case({"stop": ["wizards"]}),
    "behind an echo": Case({"echo": "The prompt."}),
    "ended by the program": Case({}, list(SAYS.encode())),
    "ended by the program, with a stop string that almost came": Case({"stop": ["9!?"]}, list(SAYS.encode())),
    "ended by the program in the middle of a character": Case({}, list(SAYS.encode()[:3])),
}
"""Cases of answers by a token program."""


@pytest.fixture(autouse=True)
def a_chunk_for_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.generation.output_chunks.COALESCE_S", -1.0)


@dataclass(frozen=True, slots=True)
class Told:
    """An answer as it stands in the log."""

    chunks: list[OutputChunk]
    done: WalkCompleted

    @property
    def seen(self) -> dict[str, Any]:
        """All of it that does not hang on where it was cut."""
        return {
            "text": "".join(chunk.text for chunk in self.chunks),
            "token_ids": [id for chunk in self.chunks for id in chunk.token_ids],
            "logprobs": [told for chunk in self.chunks for told in chunk.logprobs or []],
            "echo": [chunk.metadata for chunk in self.chunks if chunk.is_echo],
            "choice": {chunk.choice for chunk in self.chunks},
            "facts": {name: fact for name, fact in self.done.results[-1].facts.items() if name != "counts"},
        }


async def answer(case: Case, *kept: Sequence[OutputChunk]) -> Told:
    """The answer, after attempts of which each left these chunks behind those of the one before it."""
    attempt = len(kept) + 1
    async with rigged() as rig:
        rig.engine.says["r"] = case.says
        for number, chunks in enumerate(kept, start=1):
            harness.admit(rig.server)
            for chunk in chunks:
                rig.server.append(SUBJECTS.output("g-1", "r", "w0"), encode(chunk))
            rig.put_fence(harness.fence("r", number + 1))
        rig.start(ready("r", *chat([5, 6, 7], **case.args), attempt=attempt, step=1, seed=11))
        done = await finished(rig, attempt)
        told = Told(rig.events(OutputChunk), done)
        assert done.output == totals_of(told.chunks)
        assert_follow_on(told.chunks)
        for spec in rig.engine.submitted:
            assert (spec.sampling.seed, spec.sampling.sample_index) == (11, case.args.get("choice", 0))
            assert spec.prefix_ids == list(case.says)[: len(spec.prefix_ids)]
        return told


async def finished(rig: Rig, attempt: int) -> WalkCompleted:
    """Step until the answer is complete; nothing is computed where it had ended."""
    while not (found := rig.events(WalkCompleted)):
        rig.engine.run_out()
        await harness.turns(1)
    assert found[0].attempt == attempt
    return found[0]


def totals_of(chunks: Sequence[OutputChunk]) -> OutputTotals:
    transcript = Transcript()
    for chunk in chunks:
        transcript.fold(chunk)
    return transcript.totals


def assert_follow_on(chunks: Sequence[OutputChunk]) -> None:
    text = tokens = 0
    for place, chunk in enumerate(chunks):
        assert (chunk.index, chunk.text_offset, chunk.token_offset) == (place, text, tokens)
        text, tokens = text + len(chunk.text), tokens + len(chunk.token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
async def test_an_answer_that_is_interrupted_anywhere_is_the_answer(name: str) -> None:
    case = CASES[name]
    whole = await answer(case)
    assert len(whole.chunks) >= len(whole.seen["token_ids"]) > 0
    await interrupt_anywhere(case, whole)


@pytest.mark.parametrize("name", PROGRAMS)
async def test_so_is_an_answer_by_a_program_and_its_emissions_stay_whole(name: str) -> None:
    case = replace(PROGRAMS[name], args=PROGRAMS[name].args | {"token_program": "fill"})
    whole = await answer(case)

    sizes = [len(chunk.token_ids) for chunk in whole.chunks if chunk.token_ids]
    assert set(sizes[:-1]) <= {EMISSION}
    if name.startswith("ended by the program"):
        assert whole.seen["text"] == bytes(case.says).decode(errors="replace")
    await interrupt_anywhere(case, whole)


async def interrupt_anywhere(case: Case, whole: Told) -> None:
    """Interrupt the answer after each of its chunks, once and twice."""
    for at in range(len(whole.chunks) + 1):
        once = await answer(case, whole.chunks[:at])
        assert once.seen == whole.seen, f"interrupted behind {at} chunks"
        assert once.chunks[:at] == whole.chunks[:at]
        assert {chunk.attempt for chunk in once.chunks[at:]} <= {2}
        twice = await answer(case, once.chunks[:at], once.chunks[at : at + 2])
        assert twice.seen == whole.seen, f"interrupted behind {at} chunks, and two further on"
        assert {chunk.attempt for chunk in twice.chunks[at + 2 :]} <= {3}


@pytest.mark.parametrize("name", ["to a stop string", "with all of it"])
async def test_it_may_have_been_cut_otherwise_before(name: str) -> None:
    """Chunks of several tokens, as a slow log makes them: the boundary is in the middle of nothing."""
    case = CASES[name]
    whole = await answer(case)
    tokens = [chunk for chunk in whole.chunks if chunk.token_ids]
    echoes = [chunk for chunk in whole.chunks if not chunk.token_ids]
    for size in (2, 5, 9):
        glued = list(echoes)
        for start in range(0, len(tokens) - size, size):
            parts = tokens[start : start + size]
            logprobs = [told for part in parts for told in part.logprobs or []]
            glued.append(
                msgspec.structs.replace(
                    parts[0],
                    index=len(glued),
                    text="".join(part.text for part in parts),
                    token_ids=[id for part in parts for id in part.token_ids],
                    logprobs=logprobs or None,
                )
            )
        again = await answer(case, glued)
        assert again.seen == whole.seen
