"""The server of vLLM's tests: ours, with `SERVED_CHECKPOINT` under the name of the model they ask for."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self
from unittest.mock import MagicMock

import anthropic
import openai

START_S = 60.0
_NAME = "--served-model-name"
ROCM_EXTRA_ARGS: list[str] = []


class RemoteOpenAIServer:
    """A deployment until the end of a `with` block. Of vLLM's arguments, only the served name is used."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, arguments: Sequence[str] = (), *_args: object, **_options: object) -> None:
        if _NAME in arguments:
            model = arguments[arguments.index(_NAME) + 1]
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        root = Path(self._folder.name)
        command = [sys.executable, "-m", "dalsegno", "serve", os.environ["SERVED_CHECKPOINT"], "--port", "0"]
        command += ["--set", f"name={model}"]
        command += ["--data-dir", str(root / "data"), "--ready-file", str(root / "ready.json")]
        environment = {**os.environ, "PYTHONPATH": os.environ["SERVER_REPOSITORY"]}
        self._process = subprocess.Popen(command, cwd=os.environ["SERVER_REPOSITORY"], env=environment)
        self._url = self._wait(root / "ready.json")

    def _wait(self, ready: Path) -> str:
        """Poll for the ready file, because another process writes it."""
        deadline = time.monotonic() + START_S
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"expected a server within {START_S} s, found status {self._process.poll()}"
                )
            time.sleep(0.05)
        url: str = json.loads(ready.read_text())["url"]
        return url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._folder.cleanup()

    @property
    def url_root(self) -> str:
        return self._url

    def url_for(self, *parts: str) -> str:
        return "/".join([self._url, *(part.strip("/") for part in parts)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), **self._client(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._client(options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self._url, **self._client(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self._url, **self._client(options))

    def _client(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 60, **options}


def __getattr__(name: str) -> Any:
    """Other helpers of vLLM's tests, of which none is needed to speak HTTP."""
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)
