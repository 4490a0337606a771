"""Run vLLM's own tests against this server: `python -m tests.vllm_suite FOLDER [PYTEST ARGUMENTS]`.

FOLDER keeps vLLM's tests, from its source package on PyPI, and a checkpoint: a tiny Qwen3 with random weights
and Qwen3's own chat template. It is served under the name of the model that each test asks for. So a test
fails that needs what the model knows, or vLLM's own wording; docs/http.md says where we differ on purpose.
None of vLLM is imported (`stand_in/names.py`).
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from safetensors.torch import load_file, save_file

from tests.models.text import published_templates
from tests.published_sources import files_of
from tests.tiny import tiny_checkpoint

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
        _unpack(sources)
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
    return subprocess.run(command, cwd=sources, env=environment, check=False).returncode


def _unpack(sources: Path) -> None:
    """Write vLLM's tests into a folder, which appears whole."""
    with tempfile.TemporaryDirectory(dir=sources.parent) as unpacked:
        root = Path(unpacked) / "source"
        for path, content in files_of("vllm", Path(_AT), ".py"):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
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
