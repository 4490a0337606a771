"""What `serve` says once all is ready: three ways to talk to it, ready to be pasted."""

import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Final

from dalsegno.address import Listen

_QUESTION: Final = "What does len do?"
_DEFAULT_PORT: Final = 8000


def welcome(model: str, listen: Listen, data_dir: Path, seconds: float) -> str:
    """The lines, for the terminal."""
    url = "" if listen.port == _DEFAULT_PORT else f" --url {listen.url}"
    name = json.dumps(model, ensure_ascii=False)
    messages = [{"role": "user", "content": _QUESTION}]
    body = shlex.quote(json.dumps({"model": model, "messages": messages, "stream": True}, ensure_ascii=False))
    return f"""
Dal Segno serves {model} at {listen.url} (ready after {seconds:.1f} s). Talk to it:

  {_program()} ask "{_QUESTION}"{url}

  curl -N {listen.url}/v1/chat/completions -d {body}

  from openai import OpenAI
  client = OpenAI(base_url="{listen.url}/v1", api_key="none")
  answer = client.chat.completions.create(model={name}, messages={json.dumps(messages)})
  print(answer.choices[0].message.content)

Data dir: {data_dir}
Ctrl-C stops it.
"""


def _program() -> str:
    """How this person starts `dalsegno`: by name where the shell finds it, else by path."""
    if shutil.which("dalsegno"):
        return "dalsegno"
    program = Path(sys.executable).with_name("dalsegno")
    return os.path.relpath(program) if program.is_file() else "python -m dalsegno"
