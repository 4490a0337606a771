import pytest

from dalsegno.history.prompts import prompt_of, with_prompt
from dalsegno.history.summary_fold import summaries
from shared.events import Inputs, RequestSubmitted, encode
from shared.log.memory import MemoryLog, MemoryStore
from tests.conductor.script import SUBJECTS


@pytest.mark.parametrize(
    ("inputs", "prompt"),
    [
        (Inputs(text="What?"), ["What?"]),
        (Inputs(token_ids=[1, 2]), []),
        (Inputs(texts=["a", [1], "b"], queries=["q"]), ["a", "b", "q"]),
        (
            Inputs(
                messages=[
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "image"}, "x"]},
                    {"role": "assistant", "content": None, "tool_calls": []},
                    {"role": "user", "content": 7},
                    {"role": "user"},
                ]
            ),
            ["Be brief.", "What?", "x"],
        ),
    ],
)
def test_a_prompt_is_every_text_of_the_inputs(inputs: Inputs, prompt: list[str]) -> None:
    assert prompt_of(inputs).split() == " ".join(prompt).split()


async def test_requests_are_found_by_their_prompts_from_the_newest_on() -> None:
    store = MemoryStore(SUBJECTS)
    for number in range(1000):
        inputs = Inputs(text=f"number {number}.")
        data = encode(RequestSubmitted(model="demo", inputs=inputs)) if number != 500 else b"junk"
        store.append(SUBJECTS.request(f"r{number}"), data)
        store.append(
            SUBJECTS.request(f"r{number}"), encode(RequestSubmitted(model="m", inputs=Inputs(text="9")))
        )
    log = MemoryLog(store)
    requests = (await summaries(log, SUBJECTS))[::-1]
    found = [one.request_id async for one in with_prompt(log, SUBJECTS, requests, lambda text: "9." in text)]
    assert found == [f"r{number}" for number in range(999, 0, -10)]
    assert [one async for one in with_prompt(log, SUBJECTS, [], lambda text: True)] == []
    every = [
        one.request_id async for one in with_prompt(log, SUBJECTS, requests, lambda text: "." not in text)
    ]
    assert every == ["r500"], "the second submission, which can be read"
