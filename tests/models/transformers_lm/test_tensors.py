"""Reading of weights: the tensors that are read, and the memory that it takes.

Memory is measured with checkpoints of about 50 MB, in a separate process.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoints.files import CheckpointError
from models.transformers_lm.loader import load_decoder
from tests.peers import Circle
from tests.tiny import Family, write_checkpoint
from tests.tiny.files import write_json

_WIDTH: Final = 512
_EXPERTS: Final = 4
_LOAD: Final = """
import ctypes, gc, json, re, sys
from pathlib import Path
from models.decoder_lm.nodes import load

def anonymous() -> int:
    told = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", told)[1]) * 1024

warm, *ways = sys.argv[1:]
load(Path(warm))  # what is made once for all models
for way in ways:
    checkpoint, device, dtype = way.split()
    gc.collect()  # the model before this one, and what malloc keeps of it, would be taken for this one's
    ctypes.CDLL(None).malloc_trim(0)
    before, seen = anonymous(), []
    node = load(
        Path(checkpoint), device=device, dtype=dtype, progress=lambda *_: seen.append(anonymous() - before)
    )
    weights = sum(one.numel() * one.element_size() for one in node.model.parameters())
    print(json.dumps({"weights": weights, "peak": max(*seen, anonymous() - before)}))
    del node
"""


def write_zeros(folder: Path, layers: int, *, experts: bool) -> str:
    """A Llama in bfloat16, or a Mixtral, whose experts are merged during loading."""
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


@pytest.mark.processes
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
    assert converted[0] < 1.2, "what is made, and a tensor"
    assert converted[1] < 1.5, "what is made, and a layer's experts before they are merged: a seventh of all"
    assert max(converted[2:]) < 0.2, "each tensor goes to its device by itself"


def changed(folder: Path, family: Family, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A checkpoint with one tensor replaced."""
    checkpoint = write_checkpoint(folder, family)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.1.mlp.down_proj.weight"),
        ("llama", "model.embed_tokens.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w3.weight"),
    ],
)
def test_what_is_not_stored_as_floats_is_refused_unless_it_is_said_what_it_stands_for(
    tmp_path: Path, family: Family, name: str, dtype: torch.dtype
) -> None:
    checkpoint = changed(tmp_path, family, name, lambda tensor: tensor.to(dtype))

    with pytest.raises(CheckpointError, match=rf"{name} is stored as \w+, expected floats, or a quant"):
        load_decoder(checkpoint, "llm")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_floats_of_every_width_are_read_as_the_numbers_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    checkpoint = changed(tmp_path, "llama", name, lambda tensor: tensor.to(dtype))
    stored = load_file(checkpoint / "model.safetensors")[name]

    assert torch.equal(load_decoder(checkpoint, "llm").model.state_dict()[name], stored.float())


@pytest.mark.slow
@pytest.mark.parametrize("rows", [63, 65])
def test_a_tensor_that_no_two_members_can_share_is_refused_by_each(tmp_path: Path, rows: int) -> None:
    """A half of 65 rows has 32 rows, and so has a half of 64."""
    name = "model.layers.1.self_attn.q_proj.weight"
    checkpoint = changed(tmp_path, "llama", name, lambda tensor: torch.cat([tensor, tensor])[:rows])

    for member in Circle(2).members():
        with pytest.raises(CheckpointError, match=rf"{name} is \({rows}, 64\), of which 2 ranks cannot"):
            load_decoder(checkpoint, "llm", peers=member)


def test_a_number_in_the_place_of_a_matrix_is_refused_by_members_too(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    checkpoint = changed(tmp_path, "llama", name, lambda tensor: tensor[0, 0])

    with pytest.raises(CheckpointError, match=rf"{name} is \(\), of which 2 ranks cannot have a part each"):
        load_decoder(checkpoint, "llm", peers=Circle(2).members()[0])


def test_another_shape_that_could_be_shared_is_told_as_a_members_part(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    checkpoint = changed(tmp_path, "llama", name, torch.t)

    with pytest.raises(
        CheckpointError, match=rf"{name} is \(128, 32\), expected \(64, 64\) in the part of one rank; are"
    ):
        load_decoder(checkpoint, "llm", peers=Circle(2).members()[0])
