"""The error of quantised weights as they are computed: `python -m benchmarks.peers.rounding --file q4_k_m`.

llama.cpp and we read the same GGUF file. What differs is the rounding of what weights are multiplied with, of
keys and values, and, in ours, of scales and embeddings. Both are compared with the file's weights in float32,
computed by torch, on a text of random tokens: the divergence of predictions (Kullback and Leibler 1951), the
perplexity, and in how many places the most likely token is the same.
"""

import argparse
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import gguf
import numpy as np
import torch

from benchmarks.machine import described
from benchmarks.peers import checkpoint
from benchmarks.peers.engine_alone import resolved
from benchmarks.peers.environments import LLAMA_CPP
from benchmarks.peers.forms import KINDS, path_of, settings_for
from benchmarks.peers.peer import ROOT
from models.transformers_lm.loader import load_decoder
from workers import settings
from workers.kv_engine.text_logits import logits_of
from workers.loading.engines import make_kv_engines

_TOKENS: Final = 200


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.rounding", description=__doc__)
    parser.add_argument("--file", choices=KINDS, default="q4_k_m", help="default: %(default)s")
    parser.add_argument("--shape", choices=checkpoint.SHAPES, default=checkpoint.QWEN3_0_6B.name)
    home = Path.home() / ".cache" / "dalsegno-bench"
    parser.add_argument("--cache", type=Path, default=home, help="default: %(default)s")
    given = parser.parse_args(arguments)
    shape = checkpoint.SHAPES[given.shape]
    folder = checkpoint.write(given.cache / shape.name, shape)
    python = str(LLAMA_CPP.make(given.cache))
    subprocess.run((python, "-m", "benchmarks.peers.to_gguf", str(folder), given.file), cwd=ROOT, check=True)
    [ids] = checkpoint.prompts(shape, 1, _TOKENS, seed="rounding")

    print(described())
    print(f"{path_of(folder, given.file).name}, {_TOKENS} tokens")
    exact = _exact(folder, given.file, ids)
    _tell("float32", exact, exact, ids)
    _tell("llama.cpp", _of_llama(python, path_of(folder, given.file), ids), exact, ids)
    for name, kwargs in (
        ("ours", {}),
        ("ours, --kv-cache int8", {"kv_cache": "int8"}),
        ("ours, bfloat16", {"quantize": "none"}),
    ):
        _tell(name, _ours(folder, given.file, ids, kwargs), exact, ids)


def _exact(folder: Path, file: str, ids: list[int]) -> torch.Tensor:
    model, _ = settings_for(folder, file)
    with torch.inference_mode():
        node = load_decoder(Path(resolved(model).checkpoint), "llm", dtype="float32")
        stored = next(one for one in gguf.GGUFReader(model).tensors if one.name == "token_embd.weight")
        # The converted folder has them in bfloat16, and all else exactly.
        embeddings = torch.from_numpy(np.array(gguf.dequantize(stored.data, stored.tensor_type)))
        node.model.get_input_embeddings().weight.copy_(embeddings)
        return node.reference(torch.tensor(ids))


def _ours(folder: Path, file: str, ids: list[int], kwargs: dict[str, str]) -> torch.Tensor:
    model, how = settings_for(folder, file)
    parsed = settings.parse(how | kwargs)
    [engine] = make_kv_engines(resolved(model), parsed, 0, lambda *_: None).values()
    return logits_of(engine.node, ids)


def _of_llama(python: str, file: Path, ids: list[int]) -> torch.Tensor:
    with tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as temporary:
        asked, found = Path(temporary) / "ids.npy", Path(temporary) / "logits.npy"
        np.save(asked, np.array(ids))
        command = (python, "-m", "benchmarks.peers.llama_logits", str(file), str(asked), str(found))
        subprocess.run(command, cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
        return torch.from_numpy(np.load(found))


def _tell(name: str, found: torch.Tensor, exact: torch.Tensor, ids: list[int]) -> None:
    own, other = exact.log_softmax(-1), found.log_softmax(-1)
    divergence = float((own.exp() * (own - other)).sum(-1).mean())
    agreement = float((own.argmax(-1) == other.argmax(-1)).float().mean())
    following = torch.tensor(ids[1:])[:, None]
    perplexity = float(other[:-1].gather(1, following).mean().neg().exp())
    print(
        f"{name:24} divergence {divergence:9.2e}   perplexity {perplexity:8.1f}   "
        f"the same most likely token {100 * agreement:5.1f} %"
    )


if __name__ == "__main__":
    main()
