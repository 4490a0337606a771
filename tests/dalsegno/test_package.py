import subprocess
import sys

import pytest

import dalsegno

_HEAVY = ("fastapi", "starlette", "torch", "numpy", "transformers", "tokenizers", "PIL")


def loaded_by(statement: str) -> set[str]:
    script = f"import sys\n{statement}\nprint(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(ended.stdout.split())


@pytest.mark.processes
def test_the_face_imports_nothing_until_it_is_asked() -> None:
    assert "httpx" not in loaded_by("import dalsegno")


@pytest.mark.processes
def test_the_client_needs_neither_the_server_nor_a_model() -> None:
    loaded = loaded_by("from dalsegno import Client; client = Client('nats://127.0.0.1:4222')")

    assert "httpx" in loaded
    assert loaded.isdisjoint(_HEAVY)


def test_everything_the_face_promises_is_there() -> None:
    for name in dalsegno.__all__:
        assert getattr(dalsegno, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Cliont'"):
        _ = dalsegno.Cliont
