"""Run vLLM's own tests against this server: `python -m tests.vllm_suite FOLDER [PYTEST ARGUMENTS]`.

FOLDER keeps vLLM's source package, which PyPI has, a checkpoint, and one line per test (`results.txt`).
The checkpoint is a tiny Qwen3 with random weights and Qwen3's own chat template. It is served under the name
of the model that each test asks for. So a test fails that needs what the model knows, or vLLM's own wording;
docs/http.md says where we differ on purpose. None of vLLM is imported (`stand_in/names.py`).
"""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

from safetensors.torch import load_file, save_file

from tests.models.text import published_templates
from tests.tiny import tiny_checkpoint

_ARCHIVE: Final = "vllm-0.33.0.tar.gz"
_SHA256: Final = "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"
_TEMPLATE: Final = "Qwen-Qwen3-0.6B.jinja"
_CONTEXT: Final = 8192
_END_SCALE: Final = 2.0
"""Answers of random weights never end; with this factor, about one token in sixteen ends one."""
_AT: Final = "tests/entrypoints/"
_TESTS: Final = (
    "anthropic/test_messages.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/completion/test_completion.py",
    "openai/models/test_models.py",
    "openai/responses/test_basic.py",
    "openai/responses/test_function_call.py",
    "openai/responses/test_simple.py",
    "openai/responses/test_stateful.py",
    "openai/responses/test_structured_output.py",
    "openai/test_return_token_ids.py",
    "serve/tokenize/test_tokenization.py",
)
_STAND_INS: Final = {"names.py": "conftest.py", "utils.py": "utils.py"}
"""A `conftest.py` in the repository would apply to our own tests."""


def main(folder: Path, arguments: list[str]) -> int:
    """Prepare the folder and run the tests; return pytest's exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = folder / "source"
    if not sources.exists():
        _unpack(published_templates.archive("https://pypi.org/simple/vllm/", _ARCHIVE), sources)
    for name, used_as in _STAND_INS.items():
        shutil.copy(Path(__file__).parent / "stand_in" / name, sources / "tests" / used_as)
    checkpoint = _checkpoint(folder)
    repository = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "SERVED_CHECKPOINT": str(checkpoint),
        "SERVER_REPOSITORY": str(repository),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(sources),
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", "."]
    command += ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"]
    command += ["-o", "asyncio_default_test_loop_scope=function", "--tb=short", "-q", "-rfE"]
    named = [argument for argument in arguments if not argument.startswith("-")]
    command += arguments if named else [*arguments, *(_AT + name for name in _TESTS)]
    with (
        (folder / "results.txt").open("w") as results,
        subprocess.Popen(command, cwd=sources, env=environment, stdout=subprocess.PIPE, text=True) as running,
    ):
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            results.write(line)
    return running.returncode


def _unpack(data: bytes, sources: Path) -> None:
    """Unpack the tests of an archive.

    Raises:
        ValueError: it is not the one that is expected.
    """
    found = hashlib.sha256(data).hexdigest()
    if found != _SHA256:
        raise ValueError(f"{_ARCHIVE}: expected the SHA-256 {_SHA256}, found {found}")
    with tempfile.TemporaryDirectory(dir=sources.parent) as unpacked:
        root = Path(unpacked) / "source"
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                path = Path(*Path(member.name).parts[1:])
                if member.isfile() and path.is_relative_to(_AT) and path.suffix == ".py":
                    content = archive.extractfile(member)
                    assert content is not None
                    (root / path).parent.mkdir(parents=True, exist_ok=True)
                    (root / path).write_bytes(content.read())
        (root / "tests" / "__init__.py").touch()
        root.rename(sources)


def _checkpoint(folder: Path) -> Path:
    templates, checkpoint = folder / "templates", folder / "checkpoint"
    published_templates.fetch(templates)
    if not checkpoint.exists():
        shutil.copytree(tiny_checkpoint("qwen3"), checkpoint)
        shutil.copy(templates / _TEMPLATE, checkpoint / "chat_template.jinja")
        config = json.loads((checkpoint / "config.json").read_text())
        config["max_position_embeddings"] = _CONTEXT
        (checkpoint / "config.json").write_text(json.dumps(config))
        weights = load_file(checkpoint / "model.safetensors")
        weights["lm_head.weight"][config["eos_token_id"]] *= _END_SCALE
        save_file(weights, checkpoint / "model.safetensors")
    return checkpoint


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    raise SystemExit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
