"""The CPU node: a prompt of the user's bytes. An asterisk becomes a token of sound."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from models.base import CpuResult
from models.sequence_request import PreparedPrompt, PrepareRequest, SamplingParams
from shared.tensors import Handle, inline_ids

START, END, PAD, USER, ASSISTANT, SOUND = 301, 302, 303, 307, 308, 311
SPOKEN_PROMPT = 9


def prompt_of(text: str) -> list[int]:
    """The thinker's prompt."""
    said = [SOUND if byte == ord("*") else byte for byte in text.encode()]
    return [START, USER, *said, END, START, ASSISTANT, ord("\n")]


def spoken_prompt_of(prompt: list[int]) -> list[int]:
    """The ids of the talker's prompt: the user's, and padding for what it begins with."""
    return [*prompt[:-3], *[PAD] * SPOKEN_PROMPT]


def load(checkpoint: Path, *, max_seq_len: int) -> "Talking":
    """Load nothing."""
    return Talking()


class Talking:
    """The node and the text of the thinker's tokens: bytes, and nothing for other tokens."""

    eos_ids = (END,)
    tool_calls = ""

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        """Make both prompts."""
        assert (node, dict(inputs)) == ("prepare", {})
        request = PrepareRequest.of(args)
        ids = prompt_of(request.inputs.text or "")
        sampling = SamplingParams(temperature=request.params.temperature)
        return CpuResult(
            facts=msgspec.to_builtins(PreparedPrompt(prompt_tokens=len(ids), sampling=sampling)),
            outputs={
                "token_ids": inline_ids(f"{key}/token_ids", ids),
                "spoken_ids": inline_ids(f"{key}/spoken_ids", spoken_prompt_of(ids)),
            },
        )

    def text_decoder(self) -> "Numbers":
        """A decoder of one text."""
        return Numbers()


class Numbers:
    """Each token as its number."""

    def push(self, token_id: int) -> str:
        """The number, and a space."""
        return f"{token_id} "

    def flush(self) -> str:
        """Nothing is held back."""
        return ""

    def bytes_of(self, token_id: int) -> bytes:
        """The number, and a space."""
        return f"{token_id} ".encode()
