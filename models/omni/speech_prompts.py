"""The prompt of a talker: what it hears of the thinker's prompt, and room for the begin of an answer."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from models.omni.prepared import Speech
from models.sequence_request import PrepareRequest, PromptPart
from models.voices import known_voice
from shared.errors import ClientError


class TalkerPrompts:
    """Makes the talker's prompts of one checkpoint. Re-entrant. Families define `of`.

    Args:
        speakers: the token of each voice, by its name; empty: the checkpoint does not speak.
        default: the voice of requests that name none, if the checkpoint has it; else it is the first.
    """

    def __init__(self, speakers: Mapping[str, int], *, default: str) -> None:
        self._speakers: Final = dict(speakers)
        self._default: Final = known_voice(default, speakers) or next(iter(speakers), "")

    def of(
        self, ids: Sequence[int], parts: Sequence[PromptPart], *, voice: str | None
    ) -> tuple[Speech, list[int]]:
        """Facts about the talker's prompt, and its token ids.

        Args:
            ids: the thinker's prompt.
            parts: the media in it.
            voice: the name of the voice; None is the default.

        Raises:
            ClientError: no speech can follow the prompt.
        """
        raise NotImplementedError

    def check(self, prepare: PrepareRequest) -> None:
        """Check a request for speech, before anything is computed.

        Raises:
            ClientError: the checkpoint does not speak, the voice is unknown, or a parameter cannot be used.
        """
        outputs, params = prepare.inputs.output_modalities, prepare.params
        if set(outputs) - {"text", "audio"}:
            raise ClientError(
                f"expected text, audio or both, found output_modalities {outputs}",
                code="unsupported_modality",
            )
        if not self._speakers:
            raise ClientError("this checkpoint thinks and does not speak: ask for text", code="not_supported")
        if params.warm or params.echo:
            raise ClientError(
                "a spoken answer consists of new tokens: leave out warm and echo", code="not_supported"
            )
        self.speaker(params.voice)

    def speaker(self, voice: str | None) -> tuple[str, int]:
        """The name of a voice, and its token. Names differ in case between files and servers.

        Raises:
            ClientError: the checkpoint has no such voice.
        """
        name = known_voice(voice if voice is not None else self._default, self._speakers)
        if name is None:
            known = ", ".join(name.capitalize() for name in self._speakers)
            raise ClientError(f"voice: expected one of {known}; found {voice!r}", code="invalid_value")
        return name, self._speakers[name]


def moved(parts: Sequence[PromptPart], spans: Sequence[tuple[int, int]]) -> list[PromptPart]:
    """The parts within the spans, at their places in the spans' tokens, without rows of their own."""
    found, before = list[PromptPart](), 0
    for start, end in spans:
        found += [
            msgspec.structs.replace(part, start=part.start - start + before, digest="")
            for part in parts
            if start <= part.start < end
        ]
        before += end - start
    return found
