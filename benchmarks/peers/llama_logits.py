"""llama.cpp's logits for a text: `python -m benchmarks.peers.llama_logits FILE.gguf IDS.npy LOGITS.npy`.

Runs in llama.cpp's environment. All tokens are in one batch, as in `benchmarks.peers.rounding`.
"""

import sys
from pathlib import Path

import numpy as np

from benchmarks.peers.llama_cpp import Model

if __name__ == "__main__":
    file, ids, logits = map(Path, sys.argv[1:])
    np.save(logits, Model(file).logits(np.load(ids).tolist()))
