"""The Triton kernel against the definition of attention, in Triton's interpreter; it compiles for a GPU."""

from pathlib import Path
from typing import Any, Final

import pytest

pytestmark = pytest.mark.processes


pytest.importorskip("triton", reason="Triton is made for Linux only")

SM_90: Final = ("cuda", 90, 32)
"""An H100 or H200."""
NUMBERS: Final = ("spans", "parts", "token_stride", "head_stride", "table_stride")
TABLES: Final = ("query_offsets", "kv_lengths", "rows", "block_table")
QWEN3_8B: Final = {
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


def test_keys_are_cut_for_a_gpu_to_be_busy_but_not_into_scraps() -> None:
    from workers.kv_engine.attention.triton import (  # noqa: PLC0415 - where there is Triton
        MAX_SPLITS,
        split_count,
    )

    assert split_count(8, 40_960, processors=132) == MAX_SPLITS
    assert split_count(256 * 8, 40_960, processors=132) == 1
    assert split_count(64 * 8, 40_960, processors=132) == 3
    assert split_count(64, 40_960, processors=132) == 17
    assert split_count(8, 1000, processors=132) == 3
    assert split_count(8, 16, processors=132) == 1


@pytest.mark.parametrize(
    "of_step",
    [
        {"tile_queries": 1, "tile_rows": 16, "is_cut": True},
        {"tile_queries": 16, "tile_rows": 64, "is_cut": False, "window": 4096, "softcap": 30.0},
    ],
    ids=["decodes", "prompts"],
)
def test_it_compiles_for_a_gpu_where_there_is_none(
    of_step: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.kv_engine.attention import (  # noqa: PLC0415 - where there is Triton
        triton as triton_attention,
    )

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    of_all = {**QWEN3_8B, **of_step}
    types = dict.fromkeys(("out", "queries", "keys", "values"), "*bf16")
    types |= dict.fromkeys(("sums", "tops", "totals"), "*fp32") | dict.fromkeys((*TABLES, "arrived"), "*i32")
    types |= dict.fromkeys(NUMBERS, "i32") | {"scaling": "fp32"}

    assert b"ELF" in _compiled(triton_attention._attend, types, of_all)


B = "*bf16"
LAYERS: Final[dict[str, tuple[dict[str, str], dict[str, Any]]]] = {
    "_add_rms_norm": (
        {"states": B, "added": B, "weight": B, "normed": B, "eps": "fp32"},
        {"width": 4096, "width_ceil": 4096, "is_added": True},
    ),
    "_rotate_and_store": (
        dict.fromkeys(("product", "of_queries", "of_keys"), B)
        | {"eps": "fp32", "cos": B, "sin": B, "slots": "*i32", "queries": B, "keys": B, "values": B},
        {"heads": 32, "kv_heads": 8, "half": 64, "half_ceil": 64, "is_normed": True},
    ),
    "_row_product": (
        dict.fromkeys(("out", "states", "weight", "bias"), B),
        {
            "outs": 12_288,
            "width": 4096,
            "has_bias": False,
            "is_gated": True,
            "tile_outs": 8,
            "tile_width": 512,
        },
    ),
    "_silu_and_mul": ({"product": B, "out": B}, {"width": 12_288, "tile": 1024}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_what_lies_between_products_and_attention_compiles_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.kv_engine.gpu import triton_layers  # noqa: PLC0415 - where there is Triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    assert b"ELF" in _compiled(getattr(triton_layers, name), *LAYERS[name])


def test_the_sampler_compiles_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.kv_engine.gpu import triton_sampler  # noqa: PLC0415 - where there is Triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    floats, ints = ("logits", "temperatures", "top_ps", "min_ps"), ("top_ks", "seed_low", "seed_high")
    types = {"tokens": "*i64", "list_weights": "*i64", "list_ids": "*i32", "node": "i64"}
    types |= dict.fromkeys(floats, "*fp32") | dict.fromkeys((*ints, "sample_index", "draw_index"), "*i32")
    types |= dict.fromkeys(("width", "stride"), "i32")
    constants = {"is_random": True, "is_listing": True, "listed": 256, "tile": 512}

    assert b"ELF" in _compiled(triton_sampler._sample, types, constants)


def _compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> bytes:
    """The machine code of a kernel for an H200."""
    import triton  # noqa: PLC0415 - where there is Triton
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    signature = types | dict.fromkeys(constants, "constexpr")
    compiled = triton.compile(ASTSource(kernel, signature, constexprs=constants), target=GPUTarget(*SM_90))
    code: bytes = compiled.asm["cubin"]
    return code
