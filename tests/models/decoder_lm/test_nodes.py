"""Loading of decoder-only models: supported ones, refused ones and their errors."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError
from models.decoder_lm.nodes import DecoderLM, examine, load
from models.transformers_lm import architecture
from tests.models.decoder_lm.refused import REFUSED
from tests.tiny import FAMILIES, MODELS, Family, tiny_checkpoint, write_checkpoint


def edited(folder: Path, **changes: Any) -> Path:
    """A checkpoint with changed values in its `config.json`."""
    path = write_checkpoint(folder) / "config.json"
    config = json.loads(path.read_text()) | changes
    if config["model_type"] not in ("qwen3", "llama"):
        config = {"num_hidden_layers": 4} | changes  # for the rest, what that family's own config defaults to
    path.write_text(json.dumps(config))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "shards"), [("F32", 1), ("BF16", 3)])
def test_a_checkpoint_in_hub_format_becomes_a_node(family: Family, dtype: Any, shards: int) -> None:
    node = load(tiny_checkpoint(family, dtype=dtype, shards=shards))

    model = MODELS[family]
    assert node.layout == model.kv_layout
    assert (node.vocab_size, node.max_positions) == (512, model.max_positions)
    assert node.dtype is torch.float32
    assert node.architecture == model.architecture


@pytest.mark.slow
def test_rope_scaling_is_read_from_the_checkpoint() -> None:
    ids = torch.arange(1, 200)
    plain, scaled = (load(tiny_checkpoint(f)) for f in ("llama", "llama3_rope"))

    assert scaled._model.config.rope_parameters["rope_type"] == "llama3"
    assert plain._model.config.rope_parameters["rope_type"] == "default"
    assert scaled.reference(ids).shape == (199, 512)


class One:
    """A step of one token, which needs no mask under any attention."""

    token_ids = torch.zeros(1, dtype=torch.int32)
    positions = torch.zeros(1, dtype=torch.int32)
    routes = None
    long_factors = None


def test_embed_forward_head_are_the_stock_model() -> None:
    node = load(tiny_checkpoint("qwen3"))
    ids = torch.tensor([7], dtype=torch.int32)

    with torch.inference_mode():
        logits = node.head(node.forward(node.embed(ids), One()), torch.tensor([0]))

    assert torch.allclose(logits, node.reference(ids), atol=1e-5)


@pytest.mark.parametrize(
    ("asked", "stored", "found"),
    [
        ("auto", "BF16", torch.float32),
        ("bfloat16", "F32", torch.bfloat16),
        ("float16", "BF16", torch.float16),
        ("float32", "BF16", torch.float32),
    ],
)
def test_the_dtype_is_the_one_asked_for(asked: str, stored: Any, found: torch.dtype) -> None:
    assert load(tiny_checkpoint("qwen3", dtype=stored), dtype=asked).dtype is found


def test_a_model_too_large_for_float32_on_a_cpu_is_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "CPU_FLOAT32_BYTES", 1000)

    assert load(tiny_checkpoint("qwen3", dtype="BF16")).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("stored", "multiplies", "found"),
    [
        ("BF16", True, torch.bfloat16),
        ("BF16", False, torch.float32),
        ("F32", True, torch.float32),
    ],
)
def test_a_large_model_stays_in_bfloat16_if_the_processor_supports_it(
    monkeypatch: pytest.MonkeyPatch, stored: Any, multiplies: bool, found: torch.dtype
) -> None:
    monkeypatch.setattr(architecture, "CPU_BFLOAT16_BYTES", 1000)
    monkeypatch.setattr(architecture, "has_bfloat16_instructions", lambda: multiplies)

    assert load(tiny_checkpoint("qwen3", dtype=stored)).dtype is found


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(CheckpointError, match="found 'int4'"):
        load(tiny_checkpoint("qwen3"), dtype="int4")


def test_progress_counts_every_byte_of_every_tensor() -> None:
    checkpoint = tiny_checkpoint("qwen3", shards=2)
    seen: list[tuple[int, int, str]] = []

    load(checkpoint, progress=lambda done, total, name: seen.append((done, total, name)))

    done = [at for at, _, _ in seen]
    assert done == sorted(done)
    assert {total for _, total, _ in seen} == {done[-1]}
    assert len({name for _, _, name in seen}) == len(seen) == 25


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "reason"), [(refused.config, refused.reason) for refused in REFUSED])
def test_what_cannot_be_served_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    edited(tmp_path, **changes)

    with pytest.raises(UnsupportedArchitectureError, match=reason):
        load(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "name"),
    [pair for pair in CAUSAL.items() if isinstance(pair[1], str)],
)
def test_every_causal_model_of_transformers_is_served_or_refused_by_name(
    tmp_path: Path, model_type: str, name: str
) -> None:
    config = {"architectures": [name], "model_type": model_type, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))

    try:
        found = examine(tmp_path, "llm") > 0
    except CheckpointError as refused:
        found = name in refused.message

    assert found


def test_a_dense_hybrid_is_loaded_from_numbers_that_json_lacks() -> None:
    assert load(tiny_checkpoint("granite4"))._model.config.time_step_limit == (0.0, float("inf"))


def test_unexpected_weights_are_refused(tmp_path: Path) -> None:
    """Loaded as a Llama, this Qwen3 would answer without its norms."""
    edited(tmp_path, architectures=["LlamaForCausalLM"], model_type="llama")

    with pytest.raises(CheckpointError, match=r"no place in LlamaForCausalLM: 4 tensors, .*k_norm"):
        load(tmp_path)


def test_the_checkpoint_cannot_choose_the_attention_implementation(tmp_path: Path) -> None:
    node = load(edited(tmp_path, _attn_implementation="evil/kernels", attn_implementation="evil/kernels"))

    assert node._model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"{", "cannot be read"),
        (b"[]", "cannot be read"),
        (b"{}", "expected architectures"),
    ],
)
def test_a_damaged_config_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = write_checkpoint(tmp_path) / "config.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_config_with_impossible_values_is_named(tmp_path: Path) -> None:
    edited(tmp_path, hidden_size="large")

    with pytest.raises(CheckpointError, match=r"config\.json makes no Qwen3ForCausalLM: .*hidden_size"):
        load(tmp_path)


def test_weights_that_lack_a_tensor_are_refused(tmp_path: Path) -> None:
    edited(tmp_path, num_hidden_layers=3)

    with pytest.raises(CheckpointError, match=r"lack Qwen3ForCausalLM: 11 tensors, model\.layers\.2"):
        load(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    edited(tmp_path, intermediate_size=64)

    with pytest.raises(
        CheckpointError, match=r"do not fit Qwen3ForCausalLM: \d+ tensors .*_proj.* expected \("
    ):
        load(tmp_path)


def test_a_truncated_checkpoint_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    seen: list[str] = []

    with pytest.raises(CheckpointError, match="not whole"):
        load(tmp_path, progress=lambda done, total, name: seen.append(name))
    assert not seen


@pytest.mark.processes
def test_loading_imports_one_modelling_file_and_neither_tokenizers_nor_torchvision() -> None:
    """In a separate process: an import cannot be undone, and this file imports `auto` itself."""
    script = f"""
import sys
from pathlib import Path
from models.decoder_lm.nodes import load
load(Path({str(tiny_checkpoint("qwen3"))!r}))
modelling = [n for n in sys.modules if n.startswith("transformers.models.") and ".modeling_" in n]
loaded = {{name.split(".")[2] for name in modelling}}
others = {{"torchvision", "transformers.models.auto.tokenization_auto"}} & sys.modules.keys()
print(sorted(loaded - {{"auto"}}), sorted(others))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "['qwen3'] []"


def test_a_node_accepts_embeddings_instead_of_ids() -> None:
    node: DecoderLM = load(tiny_checkpoint("qwen3"))
    ids = torch.tensor([5], dtype=torch.int32)
    embeddings = node._model.get_input_embeddings()(ids)

    with torch.inference_mode():
        assert torch.equal(node.forward(embeddings, One()), node.forward(ids, One()))


@pytest.mark.slow
def test_a_folder_in_the_format_of_embedding_models_is_loaded(tmp_path: Path) -> None:
    """Saved without its head: no name starts with `model.`, and the embeddings are the head."""
    checkpoint = write_checkpoint(tmp_path, "qwen3")
    [file] = checkpoint.glob("*.safetensors")
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    del tensors["lm_head.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))

    published, whole = load(checkpoint), load(tiny_checkpoint("qwen3"))

    ids = torch.tensor([7], dtype=torch.int32)
    with torch.inference_mode():
        # Not bit for bit: the order of sums on a CPU depends on the alignment of a weight in memory.
        torch.testing.assert_close(published.forward(ids, One()), whole.forward(ids, One()))
