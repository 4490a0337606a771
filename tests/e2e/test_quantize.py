"""`dalsegno serve --quantize --kv-cache`: an answer of what is rounded, its error in the log, a refusal."""

from pathlib import Path

import pytest

from tests.e2e import clients, deploy
from workers.cpu_kernels import library


@pytest.mark.timeout(300)
@pytest.mark.skipif(library.load() is None, reason="there are no CPU kernels on this machine")
async def test_a_model_is_quantised_by_a_flag(tmp_path: Path) -> None:
    body = {"model": "demo", "prompt": "What does len do?", "temperature": 0, "max_tokens": 8}

    # The demo's checkpoint is that of the repository, in which tests write nothing.
    flags = ("--quantize", "int8", "--kv-cache", "int8", "--set", "model_kwargs.keep_quantised=false")
    with deploy.serve(tmp_path, *flags, model="demo") as running:
        async with clients.http(running) as http:
            first, again = [(await http.post("/v1/completions", json=body)).json() for _ in range(2)]
        told = running.log()

    assert first["choices"][0]["text"] == again["choices"][0]["text"] != ""
    assert "weights of int8: perplexity" in told
    assert "keys and values of int8: perplexity" in told


def test_a_model_that_cannot_be_quantised_is_refused_at_once(tmp_path: Path) -> None:
    why = "quantize is int4, but the model has no node with layers of a language model"

    with (
        pytest.raises(AssertionError, match=why),
        deploy.serve(tmp_path, "--quantize", "int4", model="demo-draw"),
    ):
        pass
