"""The model and the tokens of an answer, of each kind that a line can ask for."""

import pytest

from gateway.batches.answer_usage import answer_usage
from shared.events import Usage


@pytest.mark.parametrize(
    ("body", "model", "usage"),
    [
        (
            (
                b'{"model":"m","usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8,'
                b'"prompt_tokens_details":{"cached_tokens":4},"completion_tokens_details":{"reasoning_tokens":2}}}'
            ),
            "m",
            Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=4, reasoning_tokens=2),
        ),
        (
            (
                b'{"model":"m","usage":{"input_tokens":5,"input_tokens_details":{"cached_tokens":1},'
                b'"output_tokens":3,"output_tokens_details":{"reasoning_tokens":2},"total_tokens":8}}'
            ),
            "m",
            Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=1, reasoning_tokens=2),
        ),
        (b'{"model":"e","usage":{"prompt_tokens":7,"total_tokens":7}}', "e", Usage(prompt_tokens=7)),
        (b'{"model":"r","usage":null}', "r", Usage()),
        (b'{"results":[]}', "", Usage()),
        (b'{"usage":{"prompt_tokens":"many"}}', "", Usage()),
        (b"RIFF", "", Usage()),
    ],
)
def test_the_tokens_are_counted_whatever_they_are_called(body: bytes, model: str, usage: Usage) -> None:
    found = answer_usage(body)

    assert (found.model, found.usage) == (model, usage)
