"""Outputs of chats: text, sound (`gateway.openai.sound`), and images as parts of a message.

OpenAI's API has no images in the answer of a chat. Here they are in `images` of a message, and of a stream's
delta, as OpenRouter has them: parts with data URLs, as a message of a user has them. The `content` remains a
string, so that OpenAI's clients read it.

    {"role": "assistant", "content": "Here it is.", "images": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}]}
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.errors import InvalidParamError
from gateway.served_model import ServedModel
from shared.events import OutputChunk
from shared.output_pieces import PieceAssembler
from shared.validation_errors import described

_TEXT, IMAGE = "text", "image"
_OUTPUTS: Final = (_TEXT, IMAGE, "audio")


def check_outputs(outputs: Sequence[str], served: ServedModel) -> None:
    """Refuse output modalities (the field `modalities`) that a chat, or this model, does not have.

    Raises:
        InvalidParamError: there is one.
    """
    for output in outputs:
        if output not in _OUTPUTS or output not in served.outputs:
            known = ", ".join(one for one in _OUTPUTS if one in served.outputs)
            raise InvalidParamError(
                "modalities",
                f"modalities: the model {served.name!r} answers a chat in {known}, found {described(output)}",
                code="unsupported_modality",
            )


@dataclass(slots=True)
class ImageParts:
    """Reads the images of one choice out of its chunks."""

    _pieces: PieceAssembler[bytes] = field(default_factory=PieceAssembler)

    def push(self, chunk: OutputChunk) -> dict[str, Any] | None:
        """Add a chunk; return the image that it completes, as a part of a message."""
        if chunk.modality != IMAGE:
            return None
        pieces = self._pieces.push(chunk.metadata, chunk.data or b"")
        if pieces is None:
            return None
        kind = chunk.metadata.get("content_type", "application/octet-stream")
        url = f"data:{kind};base64,{b64encode(b''.join(pieces)).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}
