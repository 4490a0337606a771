"""A question whose answer is not only text: text is printed as it arrives, all else is saved to files.

It uses `POST /generate` through the Python client, so the answer survives the loss of a connection.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from dalsegno.ask.chat import ChatPrompt
from dalsegno.ask.speech import FORMATS, save_speech
from dalsegno.client import Answer, Client
from dalsegno.client.request import RequestOptions
from dalsegno.client.videos import video_request
from shared.errors import ClientError
from shared.ids import is_token

_AUDIO: Final = "audio"
_MODALITIES: Final = {
    **dict.fromkeys(("png", "jpg", "jpeg", "webp"), "image"),
    **dict.fromkeys(("wav", *sorted(FORMATS)), _AUDIO),
    "mp4": "video",
}
"""The modality to ask for, by the extension of the file that it is saved to."""
_FORMS: Final = {"jpg": "jpeg", "jpeg": "jpeg", "webp": "webp"}
"""The option `output_format`, by extension; PNG is what comes unasked."""


def ask_for_outputs(
    prompt: ChatPrompt,
    folder: Path,
    *,
    voice: str | None = None,
    show: Callable[[str], None],
    report: Callable[[Mapping[str, Any]], None],
    **more: Any,
) -> list[Path]:
    """Ask, and save the outputs of all modalities but text in `folder`; return their paths.

    Args:
        prompt: the question.
        folder: it is made if it does not exist; files of the same names are replaced.
        voice: of speech; None is the model's usual one.
        show: called with each piece of the answer's text.
        report: called with the progress of the request.
        more: further arguments of `Client.stream`, such as `images`.

    Raises:
        DalSegnoError: there is no server, it refuses, or the answer breaks off.
    """
    _check_folder(folder)
    return save_outputs(_answer(prompt, show, report, {**more, **_speaking(voice)}), folder)


def ask_for_file(
    prompt: ChatPrompt,
    path: Path,
    *,
    size: str | None,
    seconds: float | None = None,
    voice: str | None = None,
    show: Callable[[str], None],
    report: Callable[[Mapping[str, Any]], None],
    **more: Any,
) -> Path:
    """Ask for an image, sound or a video, and save it; the extension of `path` says which, and in what form.

    Args:
        prompt: the question.
        path: a file that is there already is replaced.
        size: of an image or a video, `WIDTHxHEIGHT` in pixels; None leaves it to the server.
        seconds: the length of a video; None leaves it to the server.
        voice: of speech; None is the model's usual one.
        show: called with each piece of the answer's text.
        report: called with the progress of the request.
        more: further arguments of `Client.stream`, such as `images`.

    Raises:
        DalSegnoError: the extension is unknown, the file cannot be written, there is no server, it
            refuses, or the answer breaks off.
    """
    extension = path.suffix.lstrip(".").lower()
    modality = _MODALITIES.get(extension)
    if modality is None:
        known = ", ".join(f".{one}" for one in _MODALITIES)
        raise ClientError(f"{path}: expected a file name that ends in one of {known}")
    if seconds is not None and modality != "video":
        raise ClientError(f"{path}: --seconds is that of a video: name a file that ends in .mp4")
    _check_file(path)
    form = _FORMS.get(extension)
    if voice is not None and modality != _AUDIO:
        raise ClientError(f"{path}: --voice is that of speech: name a file that ends in .wav or .mp3")
    if extension in FORMATS:
        if prompt.files:
            raise ClientError(f"{path}: an answer to files is saved as .wav: name a file that ends in it")
        return save_speech(prompt, path, voice)
    wanted: RequestOptions = {"output_modalities": (modality,)}
    if form is not None:
        wanted["options"] = {"output_format": form}
    answer = _answer(
        prompt, show, report, {**more, **_speaking(voice), **video_request(wanted, size, seconds)}
    )
    if modality == _AUDIO and answer.audio is not None:
        return answer.audio.save(path)
    media = answer.media.get(modality)
    if not media:
        raise ClientError(f"the answer has no {modality}, so {path} was not written")
    return media[-1].save(path)


def _speaking(voice: str | None) -> RequestOptions:
    return {} if voice is None else {"voice": voice}


def _answer(
    prompt: ChatPrompt,
    show: Callable[[str], None],
    report: Callable[[Mapping[str, Any]], None],
    more: Mapping[str, Any],
) -> Answer:
    optional = {
        "model": prompt.model,
        "max_tokens": prompt.max_tokens,
        "temperature": prompt.temperature,
        "seed": prompt.seed,
    }
    given: dict[str, Any] = {name: value for name, value in optional.items() if value is not None}
    with (
        Client(prompt.url, api_key=prompt.api_key) as client,
        client.stream(prompt.text, **given, **more) as stream,
    ):
        for chunk in stream:
            if chunk.modality == "progress":
                report(chunk.metadata.get("progress", {}))
            elif chunk.text and not chunk.advisory:
                show(chunk.text)
        return stream.answer


def save_outputs(answer: Answer, folder: Path) -> list[Path]:
    """Save an answer's outputs but text: images and videos as they are, sound as WAV, tensors as `.npy`.

    Raises:
        ClientError: the server named a modality that cannot be part of a file's name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    saved: list[Path] = []
    for modality, media in answer.media.items():
        if not is_token(modality):
            raise ClientError(f"expected the name of a modality, found {modality!r}")
        if modality == _AUDIO and answer.audio is not None and media[0].is_tensor:
            saved.append(answer.audio.save(folder / "audio.wav"))
            continue
        for number, medium in enumerate(media):
            extension = "npy" if medium.is_tensor else medium.extension
            saved.append(medium.save(folder / f"{modality}-{number}.{extension}"))
    return saved


def _check_file(path: Path) -> None:
    """Refuse a path that cannot be written to: an answer may take minutes, and would be lost."""
    if not path.parent.is_dir():
        raise ClientError(f"{path}: there is no folder {path.parent}; make it first")
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ClientError(f"{path} cannot be written: {error.strerror or error}") from error


def _check_folder(folder: Path) -> None:
    """Make a folder, and refuse one in which no file can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ClientError(f"{folder} cannot be written to: {error.strerror or error}") from error
