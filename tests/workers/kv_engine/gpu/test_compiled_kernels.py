"""Our kernels compile for GPUs where there is none, and take no more registers and memory than is known.

A kernel that spills registers to memory, or of which few programs fit on a processor, is slow without a word.
"""

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

triton = pytest.importorskip("triton", reason="Triton is made for Linux only")

pytestmark = pytest.mark.processes

ARCHITECTURES: Final = {80: "A100", 90: "H100, H200", 100: "B200"}
B, F, H, I, U = "*bf16", "*fp32", "*fp16", "*i32", "*u8"  # noqa: E741 - an int


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel in the shape of Qwen3-8B, and its bounds per program.

    Attributes:
        find: returns the kernel; it is imported when it is compiled.
        stack: bytes of registers that are spilled, the stack.
        shared: bytes of shared memory.
    """

    find: Callable[[], Any]
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3
    registers: int = 255
    stack: int = 0
    shared: int = 48 << 10


def _attention() -> Any:
    from workers.kv_engine.attention import triton as module  # noqa: PLC0415 - where there is Triton

    return module._attend


def _layer(name: str) -> Any:
    from workers.kv_engine.gpu import triton_layers as module  # noqa: PLC0415 - where there is Triton

    return getattr(module, name)


def _few_bits(name: str) -> Any:
    from workers.kv_engine.gpu import triton_few_bits as module  # noqa: PLC0415 - where there is Triton

    return getattr(module, name)


def _sampler() -> Any:
    from workers.kv_engine.gpu import triton_sampler as module  # noqa: PLC0415 - where there is Triton

    return module._sample


ATTENTION_TYPES: Final = (
    {"out": B, "sums": F, "tops": F, "totals": F, "arrived": I, "queries": B, "keys": B, "values": B}
    | dict.fromkeys(("query_offsets", "kv_lengths", "rows", "block_table"), I)
    | {"spans": "i32", "parts": "i32", "scaling": "fp32"}
    | dict.fromkeys(("token_stride", "head_stride", "table_stride"), "i32")
)
ATTENTION: Final[dict[str, Any]] = {
    "block_size": 16,
    "kv_heads": 8,
    "group": 4,
    "dim": 128,
    "dim_ceil": 128,
    "tile_keys": 64,
    "window": 0,
    "softcap": 0.0,
    "split_turns": 4,
}
ROW_TYPES: Final = dict.fromkeys(("out", "states", "weight", "bias", "scale"), B) | {"eps": "fp32"}
ROW: Final[dict[str, Any]] = {"width": 4096, "has_bias": False, "tile_outs": 8, "tile_width": 512}
FEW_BITS_TYPES: Final = {"out": B, "states": B, "numbers": U, "upper": U, "scales": H, "minimums": H} | {
    "values": F,
    "factor": "fp32",
    "bias": B,
}
FEW_BITS: Final[dict[str, Any]] = {"outs": 4096, "width": 4096, "pairs": 2048, "has_bias": False}


def _form(bits: int, **changes: Any) -> dict[str, Any]:
    """A form of weights with 128 groups."""
    form = {"tables": 128, "bits": bits, "groups": 1, "parts": 1, "zero": 2 ** (bits - 1)}
    return form | {"has_minimums": False, "has_values": False, "is_float": False} | changes


FORMS: Final[dict[str, dict[str, Any]]] = {
    "four bits": _form(4),
    "four bits, groups of 128": _form(4, tables=32, groups=4, has_minimums=True, zero=0),
    "five bits": _form(5, has_minimums=True, zero=0),
    "six bits": _form(6, tables=256, parts=2),
    "eight bits": _form(8),
    "a table": _form(4, has_values=True),
    "floats of eight bits": _form(8, tables=1, groups=128, is_float=True),
}
KERNELS: Final[dict[str, Kernel]] = {
    **{
        f"row of {name}": Kernel(
            find=partial(_few_bits, "_few_bits_row"),
            types=FEW_BITS_TYPES | {"scale": B, "eps": "fp32"},
            constants=FEW_BITS
            | form
            | {"is_normed": True, "is_gated": True, "is_added": False, "tile_outs": 8, "tile_pairs": 256},
            registers=128,
            stack=8,
        )
        for name, form in FORMS.items()
    },
    **{
        f"{rows} rows of {name}": Kernel(
            find=partial(_few_bits, "_few_bits_rows"),
            types=FEW_BITS_TYPES | {"rows": "i32", "stride": "i32"},
            constants=FEW_BITS | form | {"tile_outs": 64, "tile_pairs": 64, "tile_rows": rows},
            shared=96 << 10,
        )
        for name, form in FORMS.items()
        for rows in (16, 64)
    },
    **{
        f"floats from {name}": Kernel(
            find=partial(_few_bits, "_dequantised"),
            types={"into": B, "start": "i32"}
            | {key: value for key, value in FEW_BITS_TYPES.items() if key not in ("out", "states", "bias")},
            constants={"width": 4096, "pairs": 2048} | form | {"tile_pairs": 256},
            registers=64,
        )
        for name, form in FORMS.items()
    },
    "attention of decodes": Kernel(
        find=_attention,
        types=ATTENTION_TYPES,
        constants=ATTENTION | {"tile_queries": 1, "tile_rows": 16, "is_cut": True},
        registers=160,
    ),
    "attention of decodes, loads overlapping": Kernel(
        find=_attention,
        types=ATTENTION_TYPES,
        constants=ATTENTION | {"tile_queries": 1, "tile_rows": 16, "is_cut": True},
        stages=5,
        registers=160,
        shared=72 << 10,
    ),
    **{
        f"attention of prompts in float32, heads of {dim}": Kernel(
            find=_attention,
            types={name: F if kind == B else kind for name, kind in ATTENTION_TYPES.items()},
            constants=ATTENTION
            | {"tile_queries": 8, "tile_rows": 32, "tile_keys": keys, "split_turns": 256 // keys}
            | {"dim": dim, "dim_ceil": dim, "is_cut": False},
            warps=8,
            registers=128,
            stack=8,
            shared=72 << 10,
        )
        for dim, keys in ((64, 32), (128, 32), (256, 16))
    },
    "attention of prompts": Kernel(
        find=_attention,
        types=ATTENTION_TYPES,
        constants=ATTENTION | {"tile_queries": 16, "tile_rows": 64, "is_cut": False},
        stack=80,
        shared=96 << 10,
    ),
    "attention of prompts with a window and a cap": Kernel(
        find=_attention,
        types=ATTENTION_TYPES,
        constants=ATTENTION
        | {"tile_queries": 16, "tile_rows": 64, "is_cut": False, "window": 4096, "softcap": 30.0},
        stack=128,
        shared=96 << 10,
    ),
    "norm": Kernel(
        find=partial(_layer, "_add_rms_norm"),
        types={"states": B, "added": B, "weight": B, "normed": B, "eps": "fp32"},
        constants={"width": 4096, "width_ceil": 4096, "is_added": True},
        warps=8,
        registers=64,
    ),
    "rotation": Kernel(
        find=partial(_layer, "_rotate_and_store"),
        types=dict.fromkeys(("product", "of_queries", "of_keys"), B)
        | {"eps": "fp32", "cos": B, "sin": B, "slots": I, "queries": B, "keys": B, "values": B},
        constants={"heads": 32, "kv_heads": 8, "half": 64, "half_ceil": 64, "is_normed": True},
        warps=1,
        registers=64,
    ),
    "activation": Kernel(
        find=partial(_layer, "_silu_and_mul"),
        types={"product": B, "out": B},
        constants={"width": 12_288, "tile": 1024},
        registers=64,
    ),
    "product of a row's norm, gated": Kernel(
        find=partial(_layer, "_row_product"),
        types=ROW_TYPES,
        constants=ROW | {"outs": 12_288, "is_normed": True, "is_gated": True, "is_added": False},
        registers=128,
    ),
    "product of a row, added": Kernel(
        find=partial(_layer, "_row_product"),
        types=ROW_TYPES,
        constants=ROW | {"outs": 4096, "is_normed": False, "is_gated": False, "is_added": True},
        registers=128,
    ),
    "sampler": Kernel(
        find=_sampler,
        types={"tokens": "*i64", "logits": F, "list_weights": "*i64", "list_ids": I}
        | {"temperatures": F, "top_ps": F, "top_ks": I, "min_ps": F}
        | dict.fromkeys(("seed_low", "seed_high", "sample_index", "draw_index"), I)
        | {"node": "i64", "width": "i32", "stride": "i32"},
        constants={"is_listing": True, "listed": 4096, "tile": 4096},
        warps=16,
        registers=128,
    ),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_within_its_bounds(
    name: str, architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415 - where there is Triton
    from triton.compiler import ASTSource  # noqa: PLC0415 - where there is Triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = KERNELS[name]
    signature = kernel.types | dict.fromkeys(kernel.constants, "constexpr")
    # As torch's allocations are.
    aligned = {(at,): [["tt.divisibility", 16]] for at, one in enumerate(signature.values()) if one[0] == "*"}
    source = ASTSource(kernel.find(), signature, constexprs=kernel.constants, attrs=aligned)

    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": kernel.warps, "num_stages": kernel.stages},
    )

    used = _resources(compiled.asm["cubin"], tmp_path)
    assert used["REG"] <= kernel.registers
    assert used["STACK"] <= kernel.stack
    assert compiled.metadata.shared <= kernel.shared


def _resources(code: bytes, folder: Path) -> dict[str, int]:
    """The registers of a thread and the bytes of stack that the machine code of one kernel takes."""
    file = folder / "kernel.cubin"
    file.write_bytes(code)
    tool = next(Path(triton.__file__).parent.glob("**/cuobjdump"))
    told = subprocess.run(
        (tool, "--dump-resource-usage", file), capture_output=True, text=True, check=True
    ).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", told)}
