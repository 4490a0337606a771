"""`dalsegno serve model.gguf`: converted once, served under the file's name, with its tokens and template."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e import clients, deploy
from tests.models.gguf.written import write_gguf
from tests.tiny import tiny_checkpoint

CHAT = [{"role": "user", "content": "What does len do?"}]


async def answered(folder: Path, model: Path, *flags: str) -> tuple[dict[str, Any], str]:
    env = {"XDG_CACHE_HOME": str(folder / "cache")}
    with deploy.serve(folder, *flags, model=str(model), env=env) as running:
        async with clients.http(running) as http:
            body = {"model": model.stem, "messages": CHAT, "temperature": 0, "max_tokens": 24}
            found = (await http.post("/v1/chat/completions", json=body)).json()
        return found, running.log()


@pytest.mark.timeout(300)
async def test_a_file_is_served_and_converted_once(tmp_path: Path) -> None:
    file = write_gguf(tiny_checkpoint("qwen2"), tmp_path / "tiny-Q8_0.gguf")

    first, told = await answered(tmp_path, file)
    again, silent = await answered(tmp_path, file)
    floats, _ = await answered(tmp_path, file, "--set", "model_kwargs.quantize=none")

    text, same, exact = (one["choices"][0]["message"]["content"] for one in (first, again, floats))
    assert text == same
    assert exact == oracle(file)
    assert text[:8] == exact[:8], "activations of eight bits change few tokens"
    assert len(set(text)) > 3
    assert told.count("is converted once") == 1
    assert silent.count("is converted once") == 1, "the terminal of both starts"


def oracle(file: Path) -> str:
    """The text that transformers generates from the file itself; embeddings are rounded as the folder's."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint("qwen2"))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    embeddings = model.get_input_embeddings().weight
    embeddings.data = embeddings.data.bfloat16().float()
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    ends = [tokenizer.convert_tokens_to_ids(one) for one in ("<|im_end|>", "<|endoftext|>")]
    found = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=ends)
    return str(tokenizer.decode(found[0, len(prompt) :], skip_special_tokens=True))


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + os.urandom(200))

    why = r"m.gguf is no whole GGUF file: .*; download it again"
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with pytest.raises(AssertionError, match=why), deploy.serve(tmp_path, model=str(file), env=env):
        pass
