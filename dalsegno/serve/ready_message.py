"""The message that `serve` prints once it is ready: commands and code to try it, ready to paste."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dalsegno.config.address import Listen
from shared.log.nats.durability import PROMISES
from shared.log.port import Durability

_QUESTION: Final = "What does len do?"
_ABOUT_A_PICTURE: Final = "What is in the picture?"
_SCENE: Final = "a red circle"
_SENTENCE: Final = "Hello, this is me."
_DEFAULT_PORT: Final = 8000
_JSON: Final = "-H 'content-type: application/json'"


def ready_message(
    model: str,
    listens: Sequence[Listen],
    data_dir: Path,
    seconds: float,
    *,
    modalities: Sequence[str],
    outputs: Sequence[str],
    voices: Sequence[str],
    durability: Durability,
    has_page: bool = True,
) -> str:
    """Return the message.

    Args:
        model: the model's name.
        listens: the addresses of its gateways.
        data_dir: the data dir.
        seconds: the duration of the start.
        modalities: the modalities that the model takes.
        outputs: the modalities that it gives.
        voices: the voices of a speech model.
        durability: the durability of an acked event.
        has_page: the gateways serve the page for people.
    """
    listen, *others = listens
    page = f"In a browser: {listen.url}\n" if has_page else ""
    ways = "\n\n".join(_ways(model, listen, modalities=modalities, outputs=outputs, voices=voices))
    return f"""
Dal Segno serves {model} at {listen.url} (ready after {seconds:.1f} s). Talk to it:

{ways}

{_elsewhere(others)}Data dir: {data_dir}
Durability: {durability}; {PROMISES[durability]}.
{page}Its requests, step by step: {_program()} studio {shlex.quote(str(data_dir))}
Ctrl-C stops it.
"""


def _ways(
    model: str, listen: Listen, *, modalities: Sequence[str], outputs: Sequence[str], voices: Sequence[str]
) -> list[str]:
    """Ways to use the model, by what it takes and gives."""
    ways = [
        _made(listen, file)
        for modality, file in (("image", "picture.png"), ("video", "film.mp4"))
        if modality in outputs and "text" in modalities
    ]
    if "transcript" in outputs:
        ways.append(_transcription(model, listen))
    elif "text" in outputs:
        ways.append(_vision(listen) if "image" in modalities else _chat(model, listen))
    elif "audio" in outputs:
        ways.append(_speech(model, listen, voices))
    elif "action" in outputs and "tensor" in modalities:
        ways.append(_robot(listen))
    elif "embedding" in outputs and "text" in modalities:
        ways.append(_embeddings(model, listen))
    elif "score" in outputs:
        ways.append(_scores(model, listen))
    return ways or [_files(listen, modalities)]


def _elsewhere(others: Sequence[Listen]) -> str:
    return f"Its other gateways: {', '.join(listen.url for listen in others)}\n" if others else ""


def _chat(model: str, listen: Listen) -> str:
    name = json.dumps(model, ensure_ascii=False)
    messages = [{"role": "user", "content": _QUESTION}]
    return f"""  {_program()} ask "{_QUESTION}"{_url_option(listen)}

  curl -N {listen.url}/v1/chat/completions {_JSON} -d {_body(model=model, messages=messages, stream=True)}

  from openai import OpenAI
  client = OpenAI(base_url="{listen.url}/v1", api_key="none")
  answer = client.chat.completions.create(model={name}, messages={json.dumps(messages)})
  print(answer.choices[0].message.content)"""


def _vision(listen: Listen) -> str:
    return f"""  {_program()} ask --file picture.png "{_ABOUT_A_PICTURE}"{_url_option(listen)}

  curl -N {listen.url}/generate -F files=@picture.png -F text={shlex.quote(_ABOUT_A_PICTURE)}"""


def _made(listen: Listen, file: str) -> str:
    return f'  {_program()} ask "{_SCENE}" --out {file}{_url_option(listen)}'


def _transcription(model: str, listen: Listen) -> str:
    name = json.dumps(model, ensure_ascii=False)
    return f"""  curl {listen.url}/v1/audio/transcriptions -F model={shlex.quote(model)} -F file=@talk.mp3

  from openai import OpenAI
  client = OpenAI(base_url="{listen.url}/v1", api_key="none")
  heard = client.audio.transcriptions.create(model={name}, file=open("talk.mp3", "rb"))
  print(heard.text)"""


def _robot(listen: Listen) -> str:
    return f"""  from openpi_client.websocket_client_policy import WebsocketClientPolicy
  policy = WebsocketClientPolicy("{listen.reached_at}", {listen.port})
  actions = policy.infer(observation)["actions"]"""


def _embeddings(model: str, listen: Listen) -> str:
    return f"  curl {listen.url}/v1/embeddings {_JSON} -d {_body(model=model, input=[_SENTENCE, _QUESTION])}"


def _scores(model: str, listen: Listen) -> str:
    texts = ["The length of a list is len(list).", "A cat sleeps."]
    body = _body(model=model, query=_QUESTION, documents=texts)
    return f"  curl {listen.url}/v1/rerank {_JSON} -d {body}"


def _files(listen: Listen, modalities: Sequence[str]) -> str:
    name = "clip.mp4" if "video" in modalities else "picture.png"
    fields = f"-F files=@{name} -F streaming=false -F tensor_format=npz"
    return f"  curl {listen.url}/generate {fields} -o answer.json"


def _url_option(listen: Listen) -> str:
    return "" if listen.port == _DEFAULT_PORT else f" --url {listen.url}"


def _speech(model: str, listen: Listen, voices: Sequence[str]) -> str:
    name = json.dumps(model, ensure_ascii=False)
    voice = {"voice": voices[0]} if voices else {}
    body = _body(model=model, input=_SENTENCE, **voice, response_format="wav")
    options = "".join(f', {key}="{one}"' for key, one in voice.items())
    return f"""  curl {listen.url}/v1/audio/speech -o speech.wav {_JSON} -d {body}

  from openai import OpenAI
  client = OpenAI(base_url="{listen.url}/v1", api_key="none")
  speech = client.audio.speech.create(model={name}, input="{_SENTENCE}"{options}, response_format="wav")
  speech.write_to_file("speech.wav")"""


def _body(**fields: object) -> str:
    return shlex.quote(json.dumps(fields, ensure_ascii=False))


def _program() -> str:
    """The user's way to start `dalsegno`: its name if the shell finds it, else its path."""
    if shutil.which("dalsegno"):
        return "dalsegno"
    program = Path(sys.executable).with_name("dalsegno")
    return os.path.relpath(program) if program.is_file() else "python -m dalsegno"
