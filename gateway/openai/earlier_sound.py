"""Earlier answers with sound, to which messages of a chat refer.

    {"role": "assistant", "audio": {"id": "audio-chatcmpl-1"}}

The model reads what was said, so such a message becomes its transcript. It is read from the log, so every
gateway knows it, for as long as the log does.
"""

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Final

from gateway.errors import InvalidParamError
from gateway.openai.sound import AUDIO, ID_PREFIX
from gateway.requests.recorded_answer import answer_of, status_of
from gateway.requests.relay import Failed
from gateway.requests.service import Gateway
from gateway.requests.status import PartStatus
from shared.errors import ClientError
from shared.events import OutputChunk
from shared.ids import parse_request_id
from shared.validation_errors import described

_TEXT: Final = "text"


class NoSoundError(ClientError):
    """There is no such answer, or it is another tenant's."""

    code = "audio_not_found"
    status = 404

    def __init__(self, where: str, audio_id: str) -> None:
        super().__init__(
            f"{where}: there is no answer with the sound {audio_id[:80]!r} here: it has not ended, was never "
            "asked for with this API key, or is older than the log; send its transcript as the content"
        )
        self.param = where


async def with_transcripts(gateway: Gateway, messages: Any, tenant: str | None) -> Any:
    """Return the messages of a chat with transcripts in the place of earlier sound.

    Other mistakes in messages are left to their parser.

    Raises:
        InvalidParamError: a reference is malformed.
        NoSoundError: the log has no such answer for the tenant.
        LogUnavailableError: the log does not answer.
    """
    if not isinstance(messages, list) or not any(map(_refers, messages)):
        return messages
    return [
        await _resolved(gateway, f"messages[{number}]", one, tenant) if _refers(one) else one
        for number, one in enumerate(messages)
    ]


def _refers(message: Any) -> bool:
    return isinstance(message, dict) and message.get(AUDIO) is not None


async def _resolved(
    gateway: Gateway, where: str, message: Mapping[str, Any], tenant: str | None
) -> dict[str, Any]:
    place, found = f"{where}.{AUDIO}", message[AUDIO]
    audio_id = found.get("id") if isinstance(found, dict) else None
    if message.get("role") != "assistant":
        raise InvalidParamError(place, f"{place}: expected it in messages of the role assistant only")
    if not isinstance(audio_id, str) or not audio_id.startswith(ID_PREFIX):
        raise InvalidParamError(
            f"{place}.id", f"{place}.id: expected the id of an answer's sound, found {described(audio_id)}"
        )
    rest = {name: value for name, value in message.items() if name != AUDIO}
    if message.get("content"):  # a client that sends the whole message back: the transcript is there
        return rest
    try:
        request_id = parse_request_id(audio_id.removeprefix(ID_PREFIX))
    except ClientError as error:
        raise NoSoundError(f"{place}.id", audio_id) from error
    part = await status_of(gateway, request_id)
    event = part.event
    if (
        event is None
        or event.tenant != tenant
        or part.status != "finished"
        or AUDIO not in event.inputs.output_modalities
    ):
        raise NoSoundError(f"{place}.id", audio_id)
    transcript = await _transcript(gateway, part)
    if transcript is None:
        raise NoSoundError(f"{place}.id", audio_id)
    return {**rest, "content": transcript}


async def _transcript(gateway: Gateway, part: PartStatus) -> str | None:
    """The text of a request's answer; None if the log has forgotten a part of it."""
    texts = []
    async with aclosing(answer_of(gateway, part)) as items:
        async for item in items:
            if isinstance(item, Failed):
                return None
            if isinstance(item, OutputChunk) and item.modality == _TEXT and not item.advisory:
                texts.append(item.text)
    return "".join(texts)
