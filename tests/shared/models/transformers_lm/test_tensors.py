"""How much memory loading takes: checkpoints of some 50 MB, read in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import save_file

from tests.tiny.files import write_json

_WIDTH: Final = 512
_EXPERTS: Final = 4
_LOAD: Final = """
import json, re, sys
from pathlib import Path
from shared.models.decoder_lm.nodes import load

def anonymous() -> int:
    told = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", told)[1]) * 1024

warm, *ways = sys.argv[1:]
load(Path(warm))  # what is made once for all models
for way in ways:
    checkpoint, device, dtype = way.split()
    before, seen = anonymous(), []
    node = load(
        Path(checkpoint), device=device, dtype=dtype, progress=lambda *_: seen.append(anonymous() - before)
    )
    weights = sum(one.numel() * one.element_size() for one in node.model.parameters())
    print(json.dumps({"weights": weights, "peak": max(*seen, anonymous() - before)}))
    del node
"""


def write_zeros(folder: Path, layers: int, *, experts: bool) -> str:
    """A Llama, or a Mixtral, whose experts are merged when they are read; in bfloat16."""
    config = {
        "architectures": ["MixtralForCausalLM" if experts else "LlamaForCausalLM"],
        "model_type": "mixtral" if experts else "llama",
        "vocab_size": _WIDTH,
        "hidden_size": _WIDTH,
        "intermediate_size": _WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_local_experts": _EXPERTS,
        "max_position_embeddings": 64,
    }
    square, line = (_WIDTH, _WIDTH), (_WIDTH,)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": square, "lm_head": square, "model.norm": line}
    for at in (f"model.layers.{layer}" for layer in range(layers)):
        shapes |= {f"{at}.{norm}_layernorm": line for norm in ("input", "post_attention")}
        shapes |= {f"{at}.self_attn.{name}_proj": square for name in "qkvo"}
        if experts:
            moe = f"{at}.block_sparse_moe"
            names = [
                f"{moe}.experts.{expert}.w{matrix}" for expert in range(_EXPERTS) for matrix in (1, 2, 3)
            ]
            shapes |= dict.fromkeys(names, square) | {f"{moe}.gate": (_EXPERTS, _WIDTH)}
        else:
            shapes |= {f"{at}.mlp.{name}_proj": square for name in ("gate", "up", "down")}
    folder.mkdir()
    write_json(folder / "config.json", config)
    zeros = {f"{name}.weight": torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(zeros, folder / "model.safetensors")
    return str(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_loading_takes_no_more_memory_than_what_is_made(tmp_path: Path) -> None:
    warm = write_zeros(tmp_path / "warm", 1, experts=True)
    plain = write_zeros(tmp_path / "plain", 14, experts=False)
    merged = write_zeros(tmp_path / "merged", 7, experts=True)
    ways = [
        f"{plain} cpu bfloat16",
        f"{plain} cpu float32",
        f"{merged} cpu float32",
        f"{plain} meta float32",
        f"{merged} meta float32",
    ]

    done = subprocess.run(
        [sys.executable, "-c", _LOAD, warm, *ways], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    found: list[Any] = [json.loads(line) for line in done.stdout.splitlines()]
    stored, *converted = (told["peak"] / told["weights"] for told in found)
    assert stored < 0.1, "the weights are the file's pages"
    assert max(converted[:2]) < 1.2, "what is made, and a tensor"
    assert max(converted[2:]) < 0.2, "each tensor goes to its device by itself"
