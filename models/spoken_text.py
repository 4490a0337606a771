"""What families of text to speech take of a request: one text, a voice, and no parameter of text output."""

from collections.abc import Sequence

from models.voices import known_voice
from shared.errors import ClientError
from shared.events import Inputs, Params


class NoText:
    """Detokenizer of audio tokens, which have no text (`models.base.TextDecoder`)."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def bytes_of(self, token_id: int) -> bytes:
        return b""


def text_to_speak(request: Inputs) -> str:
    """The text of a request.

    Raises:
        ClientError: it has media, asks for other output than speech, or has no text.
    """
    if request.files or set(request.input_modalities) - {"text"}:
        found = [medium.modality for medium in request.files] or request.input_modalities
        raise ClientError(f"this model reads text only; found {found}", code="unsupported_modality")
    if request.output_modalities != ["audio"]:
        raise ClientError(
            f"this model speaks: expected output_modalities ['audio'], found {request.output_modalities}",
            code="unsupported_modality",
        )
    if request.text is None:
        given = "messages" if request.messages is not None else "token_ids"
        raise ClientError(
            f"this model speaks one text and takes no {given}: send the text itself "
            "(POST /v1/audio/speech, or /generate with text)",
            code="not_supported",
        )
    if not request.text.strip():
        raise ClientError("the text is empty: expected at least one word")
    return request.text


def check_speech_params(params: Params) -> None:
    """Refuse parameters of text output.

    Raises:
        ClientError: one is given.
    """
    given = {
        "stop": params.stop,
        "logprobs": params.logprobs is not None,
        "echo": params.echo,
        "guide": params.guide is not None,
        "thinking_budget": params.thinking_budget is not None,
        "allowed_token_ids": bool(params.allowed_token_ids),
    }
    for name, value in given.items():
        if value:
            raise ClientError(
                f"{name} is a parameter of text output, and this model outputs audio: leave it out",
                code="not_supported",
            )


def check_sampled_by_draws_only(params: Params) -> None:
    """Refuse parameters of sampling other than temperature, top-p and top-k.

    Raises:
        ClientError: one is given.
    """
    given = {
        "min_p": params.min_p,
        "repetition_penalty": (params.repetition_penalty or 1) != 1,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": params.logit_bias,
        "bad_words": params.bad_words,
        "min_tokens": params.min_tokens,
        "stop_token_ids": params.stop_token_ids,
        "ignore_eos": params.ignore_eos,
    }
    for name, value in given.items():
        if value:
            raise ClientError(f"{name}: this model does not have it: leave it out", code="not_supported")


def voice_named(name: str | None, voices: Sequence[str]) -> str:
    """The voice of that name, whatever its case; the first one without a name.

    Raises:
        ClientError: there is none.
    """
    voice = voices[0] if name is None else known_voice(name, voices)
    if voice is None:
        raise ClientError(f"voice: expected one of {', '.join(voices)}; found {name!r}", code="invalid_value")
    return voice
