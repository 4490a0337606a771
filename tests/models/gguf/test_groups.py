"""Blocks of GGUF files as groups: the weights are those that llama.cpp's own package reads."""

from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from models.gguf.groups import grouped

FLOAT16S = {
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
    Type.MXFP4: (),
    Type.IQ3_S: (0,),
    Type.IQ3_XXS: (0,),
    Type.IQ2_XXS: (0,),
    Type.IQ2_XS: (0,),
    Type.IQ2_S: (0,),
}
"""The places of float16 numbers in a block; all other bytes may have any value."""
EXACT = {
    Type.Q4_0: 4,
    Type.Q4_1: 4,
    Type.Q5_0: 5,
    Type.Q5_1: 5,
    Type.Q8_0: 8,
    Type.Q4_K: 4,
    Type.Q5_K: 5,
    Type.Q6_K: 6,
    Type.IQ4_NL: 4,
    Type.IQ4_XS: 4,
    Type.IQ3_S: 4,
    Type.IQ3_XXS: 4,
    Type.IQ2_XXS: 4,
    Type.IQ2_XS: 4,
    Type.IQ2_S: 4,
    Type.Q3_K: 4,
    Type.MXFP4: 4,
}
"""The bits of their numbers here."""


def stored(kind: Type, outputs: int = 24, inputs: int = 512) -> np.ndarray:
    """A matrix of any blocks."""
    random = np.random.default_rng(int(kind))
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (outputs, inputs // per_block, size), dtype=np.uint8)
    for at in FLOAT16S[kind]:
        numbers = random.uniform(1e-4, 1e-2, (outputs, inputs // per_block, 1)).astype(np.float16)
        data[..., at : at + 2] = numbers.view(np.uint8)
    if kind is Type.MXFP4:  # powers of two, with an offset of 127
        data[..., 0] = random.integers(110, 125, data.shape[:2], dtype=np.uint8)
    return data.reshape(outputs, -1)


@pytest.mark.parametrize("kind", FLOAT16S, ids=lambda kind: kind.name)
def test_weights_are_those_of_the_file(kind: Type) -> None:
    data = stored(kind)

    found = grouped(SimpleNamespace(tensor_type=kind, data=data, shape=np.array([512, 24])))

    expected = torch.from_numpy(gguf.dequantize(data, kind).copy())
    error = (found.floats() - expected).abs()
    assert expected.std() > 0
    if kind in EXACT:
        assert found.bits == EXACT[kind]
        assert error.max() <= 1e-6 * expected.abs().max()
    else:
        most = expected.reshape(24, -1, 32).abs().amax(2).repeat_interleave(32, 1)
        assert (error <= most / 254 * 1.001).all()
