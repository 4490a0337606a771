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
_SENTENCE: Final = "Hello, this is me."
_DEFAULT_PORT: Final = 8000
_JSON: Final = "-H 'content-type: application/json'"


def ready_message(
    model: str,
    listens: Sequence[Listen],
    data_dir: Path,
    seconds: float,
    *,
    outputs: Sequence[str],
    voices: Sequence[str],
    durability: Durability,
) -> str:
    """Return the message.

    Args:
        model: the model's name.
        listens: the addresses of its gateways.
        data_dir: the data dir.
        seconds: the duration of the start.
        outputs: the modalities that the model outputs.
        voices: the voices of a speech model.
        durability: the durability of an acked event.
    """
    listen, *others = listens
    ways = (
        _speech(model, listen, voices)
        if "text" not in outputs and "audio" in outputs
        else _chat(model, listen)
    )
    return f"""
Dal Segno serves {model} at {listen.url} (ready after {seconds:.1f} s). Talk to it:

{ways}

{_elsewhere(others)}Data dir: {data_dir}
Durability: {durability}; {PROMISES[durability]}.
Ctrl-C stops it.
"""


def _elsewhere(others: Sequence[Listen]) -> str:
    return f"Its other gateways: {', '.join(listen.url for listen in others)}\n" if others else ""


def _chat(model: str, listen: Listen) -> str:
    url = "" if listen.port == _DEFAULT_PORT else f" --url {listen.url}"
    name = json.dumps(model, ensure_ascii=False)
    messages = [{"role": "user", "content": _QUESTION}]
    return f"""  {_program()} ask "{_QUESTION}"{url}

  curl -N {listen.url}/v1/chat/completions {_JSON} -d {_body(model=model, messages=messages, stream=True)}

  from openai import OpenAI
  client = OpenAI(base_url="{listen.url}/v1", api_key="none")
  answer = client.chat.completions.create(model={name}, messages={json.dumps(messages)})
  print(answer.choices[0].message.content)"""


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
