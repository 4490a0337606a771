"""GGUF files as checkpoint folders, against what they were made of and transformers' own reading of them."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError
from models.checkpoints.weights import read_shards
from models.gguf.conversion import convert
from models.transformers_lm.loader import load_decoder
from models.transformers_lm.quantised import quantised_of
from models.transformers_lm.tensors import slices_of
from tests.models.gguf.written import vocabulary_of, write_gguf
from tests.tiny import Family, tiny_checkpoint

FAMILIES: tuple[Family, ...] = (
    *("llama", "llama3_rope", "qwen2", "qwen3", "qwen3_moe", "gemma3"),
    *("gemma", "gemma2", "gpt_oss", "mixtral", "olmo2", "phi3", "phi3_longrope", "qwen2_moe", "smollm3"),
    *("granite", "olmoe"),
)
PIECES = ("gemma3", "mistral", "gemma", "gemma2", "mixtral", "phi3", "phi3_longrope")
"""Their merges are rebuilt from the vocabulary, and differ from the ones trained here in rare texts."""
KNOWN: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "smollm3": {"no_rope_layers": [1, 1]},
}
"""Values that are the same for all published sizes, so that files lack them; tiny checkpoints have others."""
HEAD = "lm_head.weight"
TEXTS = ("What does len do?", " größere naïve", "a<|im_end|>b  123\n")
Q4_0, Q5_1, Q8_0 = (gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q5_1", "Q8_0"))
F32, F16, BF16 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16"))


def converted(tmp_path: Path, family: Family, **how: Any) -> Path:
    """The folder that is made of the file of a tiny checkpoint."""
    file = write_gguf(tiny_checkpoint(family), tmp_path / "m.gguf", **how)
    convert(file, tmp_path / "cache" / "m")
    return tmp_path / "cache" / "m"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint; those in groups as floats."""
    shards = read_shards(folder)
    quantised = quantised_of(json.loads((folder / "config.json").read_text()), shards, folder)
    slices = slices_of(shards)
    named = slices if quantised is None else quantised.slices(slices)
    return {name: one[...] for name, one in named.items()}


def stored(weight: torch.Tensor, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    """The numbers of a weight in a file."""
    if weight.ndim == 1 or weight.shape[0] == 1:
        return weight
    data = weight.float().numpy()
    found = torch.from_numpy(np.array(gguf.dequantize(gguf.quantize(data, kind), kind), dtype=np.float32))
    return found.to({F32: torch.float32, F16: torch.float16}.get(kind, torch.bfloat16))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt_oss"])
def test_the_weights_are_those_of_the_model_as_the_file_has_them(tmp_path: Path, family: Family) -> None:
    found = weights(converted(tmp_path, family))
    plain = weights(tiny_checkpoint(family))

    assert found.keys() - {HEAD} == plain.keys() - {HEAD}
    for name, weight in plain.items():
        assert torch.allclose(found[name].bfloat16(), stored(weight, Q8_0).bfloat16(), rtol=0, atol=1e-6), (
            name
        )


def test_the_experts_of_gpt_oss_stay_in_mxfp4(tmp_path: Path) -> None:
    folder = converted(tmp_path, "gpt_oss")
    found, at = weights(folder), "model.layers.1.mlp.experts"
    file = {one.name: one for one in gguf.GGUFReader(tmp_path / "m.gguf").tensors}

    def floats(part: str) -> torch.Tensor:
        one = file[f"blk.1.ffn_{part}_exps.weight"]
        return torch.from_numpy(np.array(gguf.dequantize(one.data, one.tensor_type))).transpose(1, 2)

    gate, up, down = (floats(part) for part in ("gate", "up", "down"))
    assert len(torch.unique(gate)) > 8
    assert torch.equal(found[f"{at}.gate_up_proj"][..., 0::2], gate)
    assert torch.equal(found[f"{at}.gate_up_proj"][..., 1::2], up)
    assert torch.equal(found[f"{at}.down_proj"], down)
    names = {name for shard in read_shards(folder) for name in shard.tensors}
    assert {f"{at}.gate_up_proj_blocks", f"{at}.down_proj_scales"} <= names
    node = load_decoder(folder, "llm", leaves_weights=True)
    assert "model.layers.1.mlp.experts.3.gate_proj" in node.stored_weights


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("kind", [F32, F16, BF16, Q4_0, Q5_1])
def test_floats_stay_what_they_are_and_others_are_integers_in_groups(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, family: Family
) -> None:
    folder = converted(tmp_path, family, kind=kind)
    found, plain = weights(folder), weights(tiny_checkpoint(family))

    for name, weight in plain.items():
        is_grouped = kind in (Q4_0, Q5_1) and name.endswith(("_proj.weight", HEAD))  # no router
        expected = stored(weight, kind)
        assert found[name].dtype == (torch.float32 if is_grouped else expected.dtype), name
        assert torch.equal(found[name].to(expected.dtype), expected), name
    groups = {name for shard in read_shards(folder) for name in shard.tensors if name.endswith("_numbers")}
    assert len(groups) == (
        sum(name.endswith(("_proj.weight", HEAD)) for name in plain) if kind in (Q4_0, Q5_1) else 0
    )


def test_a_head_that_shares_the_embeddings_has_a_matrix_of_its_own(tmp_path: Path) -> None:
    folder = converted(tmp_path, "llama3_rope", kind=Q4_0)
    plain = weights(tiny_checkpoint("llama3_rope"))

    assert HEAD not in plain
    expected = stored(plain["model.embed_tokens.weight"], Q4_0)
    assert torch.equal(weights(folder)[HEAD].bfloat16(), expected)
    node = load_decoder(folder, "llm")
    assert "lm_head" in node.stored_weights
    assert node.model.lm_head.weight is not node.model.model.embed_tokens.weight


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_model_is_what_transformers_reads(tmp_path: Path, family: Family) -> None:
    folder = converted(tmp_path, family)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = load_decoder(folder, "llm", dtype="float32")

    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name].bfloat16(), weight.bfloat16()), name
    assert ours.max_positions == theirs.config.max_position_embeddings


@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
def test_the_tokenizer_and_the_template_are_those_of_the_model(tmp_path: Path, family: Family) -> None:
    folder = converted(tmp_path, family)
    ours, plain = (AutoTokenizer.from_pretrained(one) for one in (folder, tiny_checkpoint(family)))

    for text in TEXTS[:1] if family in PIECES else TEXTS:
        assert ours(text)["input_ids"] == plain(text)["input_ids"], text
    turns = [{"role": "user", "content": "Hi"}]
    rendered = [
        one.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) for one in (ours, plain)
    ]
    assert rendered[0] == rendered[1]
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert ours.convert_tokens_to_ids(plain.eos_token) in ends


@pytest.mark.parametrize(
    ("change", "begins"),
    [
        ({"tokenizer.ggml.add_bos_token": None}, True),  # as llama.cpp does by itself
        ({"tokenizer.ggml.add_bos_token": True}, True),
        ({"tokenizer.ggml.add_bos_token": False}, False),
    ],
)
def test_a_vocabulary_of_llama_3_prefers_whole_tokens_and_begins_texts(
    tmp_path: Path, change: dict[str, Any], *, begins: bool
) -> None:
    folder = converted(tmp_path, "llama", change={"tokenizer.ggml.pre": "llama-bpe"} | change)

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first, second = tokenizer.encode("Hi", "yo").type_ids.count(0), tokenizer.encode("Hi").ids
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    assert (second[0] == bos) is begins
    assert first == len(second)
    assert json.loads((folder / "tokenizer.json").read_text())["model"]["ignore_merges"]
    assert [text for text in tokenizer.encode("12345").tokens if text.isdigit()]


def test_marks_of_a_vocabulary_are_whole_and_visible(tmp_path: Path) -> None:
    told = vocabulary_of(tiny_checkpoint("qwen3"))
    change = {
        "tokenizer.ggml.tokens": [*told["tokenizer.ggml.tokens"], "<think>", "<|eot_id|>"],
        "tokenizer.ggml.token_type": [*told["tokenizer.ggml.token_type"], 4, 3],  # user-defined, control
        "tokenizer.ggml.bos_token_id": 509,
        "tokenizer.ggml.add_bos_token": False,
    }
    folder = converted(tmp_path, "qwen3", change=change)

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("a<think>b").ids
    assert tokenizer.encode("a<think>b").tokens == ["a", "<think>", "b"]
    assert tokenizer.decode(ids) == "a<think>b"
    assert (
        tokenizer.token_to_id("<|eot_id|>")
        in json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    )


def test_the_end_of_a_message_is_no_end_of_an_answer_of_gpt_oss(tmp_path: Path) -> None:
    told = vocabulary_of(tiny_checkpoint("gpt_oss"))
    marks = ["<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"]
    first = len(told["tokenizer.ggml.tokens"])
    change = {
        "tokenizer.ggml.tokens": [*told["tokenizer.ggml.tokens"], *marks],
        "tokenizer.ggml.token_type": [*told["tokenizer.ggml.token_type"], 3, 3, 3, 3],
        "tokenizer.ggml.eos_token_id": first + 1,
        "tokenizer.ggml.eot_token_id": first,
    }

    folder = converted(tmp_path, "gpt_oss", change=change)

    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert set(range(first, first + 4)) & set(ends) == {first + 1, first + 2, first + 3}


def test_marks_of_phi_3_take_the_white_space_behind_them(tmp_path: Path) -> None:
    told = vocabulary_of(tiny_checkpoint("phi3"))
    first = len(told["tokenizer.ggml.tokens"])
    change = {
        "tokenizer.ggml.tokens": [*told["tokenizer.ggml.tokens"], "<|user|>", "<|end|>", "<|endoftext|>"],
        "tokenizer.ggml.token_type": [*told["tokenizer.ggml.token_type"], 3, 3, 3],
        "tokenizer.ggml.scores": [*told["tokenizer.ggml.scores"], 0.0, 0.0, 0.0],
    }
    folder = converted(tmp_path, "phi3", change=change)

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    assert ids("<|user|>\na<|end|>\n<|user|>") == [first, *ids("a"), first + 1, first]
    assert ids("<|endoftext|>\na") != [first + 2, *ids("a")]


@pytest.mark.parametrize("family", FAMILIES)
def test_frequencies_and_sizes_are_those_of_the_model(tmp_path: Path, family: Family) -> None:
    ours, plain = (
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).model
        for folder in (converted(tmp_path, family, kind=F16), tiny_checkpoint(family))
    )

    for name, frequencies in plain.rotary_emb.named_buffers():
        assert torch.allclose(ours.rotary_emb.get_buffer(name), frequencies, rtol=1e-6), name
    for name in ("layer_types", "sliding_window", "hidden_activation", "rms_norm_eps", "tie_word_embeddings"):
        found, expected = (getattr(one.config, name, None) for one in (ours, plain))
        assert found == (pytest.approx(expected) if isinstance(expected, float) else expected), name
    assert {name: one.shape for name, one in ours.state_dict().items()} == {
        name: one.shape for name, one in plain.state_dict().items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_of_floats_is_the_model(tmp_path: Path, family: Family) -> None:
    folder = converted(tmp_path, family, kind=F32)
    config = AutoConfig.from_pretrained(tiny_checkpoint(family), **KNOWN.get(family, {}))
    plain = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(family), config=config, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(0, 500, (1, 60), generator=torch.Generator().manual_seed(1))

    with torch.no_grad():
        expected, found = plain(tokens).logits, ours(tokens).logits

    assert torch.allclose(found, expected, atol=1e-4 * float(expected.std()), rtol=1e-4)
    assert load_decoder(folder, "llm").layout.layers == plain.config.num_hidden_layers


@pytest.mark.parametrize("split", ["smollm", "refact"])
def test_some_split_off_each_digit(tmp_path: Path, split: str) -> None:
    folder = converted(tmp_path, "qwen3", change={"tokenizer.ggml.pre": split})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    assert tokenizer.pre_tokenizer is not None
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("it's 1234 a5")]
    assert pieces == ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġa", "5"]


def test_a_model_in_several_files_is_whole(tmp_path: Path) -> None:
    file = write_gguf(tiny_checkpoint("qwen3"), tmp_path / "m.gguf", parts=9)
    assert file.name == "m-00001-of-00003.gguf"
    convert(file, tmp_path / "whole")

    assert weights(tmp_path / "whole").keys() == weights(tiny_checkpoint("qwen3")).keys()
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"lacks m-00002-of-00003\.gguf: expected all 00003 parts of m"):
        convert(file, tmp_path / "other")


def test_files_beside_it_are_not_read(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_text((tiny_checkpoint("llama") / name).read_text())

    folder = converted(tmp_path, "qwen3")

    ours, plain = (AutoTokenizer.from_pretrained(one) for one in (folder, tiny_checkpoint("qwen3")))
    assert ours("What does len do?")["input_ids"] == plain("What does len do?")["input_ids"]
    assert ours.eos_token == plain.eos_token


def test_of_two_conversions_at_once_one_is_kept(tmp_path: Path) -> None:
    first = converted(tmp_path, "qwen3")
    before = (first / "config.json").stat().st_mtime_ns

    convert(tmp_path / "m.gguf", first)

    assert (first / "config.json").stat().st_mtime_ns == before
    assert [path.name for path in first.parent.iterdir()] == ["m"]


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "how", "why"),
    [
        ("phi3_longrope", {"without": "rope_factors_short"},
         "found rope_factors_long.weight, expected rope_factors_short.weight and"),
        ("qwen3", {"extra": {"rope_factors_long.weight": np.ones(8, np.float32)}}, "neither of them"),
        ("llama", {"extra": {"rope_freqs.weight": np.ones(3, np.float32)}}, "has 3 numbers, .* expected 8"),
        ("llama", {"extra": {"rope_freqs.weight": np.zeros(8, np.float32)}}, "some that are not positive"),
        ("gpt_oss", {"extra": {"rope_freqs.weight": np.ones(8, np.float32)}}, "one scaling of positions"),
        ("llama", {"change": {"llama.rope.freq_base": -5.0}}, "a positive number in llama.rope.freq_b"),
        ("phi3", {"change": {"phi3.rope.dimension_count": 7}}, "7 of 16 dimensions"),
        ("phi3", {"change": {"phi3.rope.dimension_count": 18}}, "18 of 16 dimensions"),
        ("phi3", {"change": {"phi3.rope.dimension_count": "all"}}, "positive integer in phi3.rope"),
        ("phi3", {"change": {"phi3.rope.scaling.type": "longrope"}}, "or tensors with factors"),
        ("mixtral", {"extra": {"blk.0.ffn_gate.0.weight": np.ones((32, 32), np.float32)}}, "expert alone"),
        ("mixtral", {"without": "ffn_up_exps"}, "ffn_up_exps.weight has none experts, expected 4"),
        ("gpt_oss", {"change": {"gpt-oss.expert_count": 3}}, "gate_exps.weight has 4 experts, expected 3"),
        ("qwen2_moe", {"change": {"qwen2moe.expert_used_count": 9}}, "most 4 experts for a token, found 9"),
        ("olmo2", {"change": {"olmo2.attention.sliding_window": 24}}, "windows .OLMo 3. is not served"),
    ],
)  # fmt: skip
def test_what_does_not_fit_a_family_is_told(
    tmp_path: Path, family: Family, how: dict[str, Any], why: str
) -> None:
    with pytest.raises(CheckpointError, match=why):
        converted(tmp_path, family, **how)


def test_experts_of_gpt_oss_in_other_bits_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.models.gguf.written._FEW_BITS", frozenset())

    with pytest.raises(UnsupportedArchitectureError, match="is stored as Q8_0: expected MXFP4"):
        converted(tmp_path, "gpt_oss", kind=Q8_0)


def test_a_gemma_2_without_caps_has_those_of_the_published_ones(tmp_path: Path) -> None:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    missing = (*caps, "attention.sliding_window")
    folder = converted(tmp_path, "gemma2", change={f"gemma2.{key}": None for key in missing})

    config = json.loads((folder / "config.json").read_text())
    assert [config[cap] for cap in caps] == [50.0, 30.0]
    assert config["sliding_window"] == 4096


@pytest.mark.parametrize(
    ("how", "kind", "why"),
    [
        ({"change": {"general.architecture": "mamba"}}, UnsupportedArchitectureError,
         "the architecture 'mamba' of a GGUF file is not served: expected one of gemma, gemma2, "),
        ({"change": {"qwen3.block_count": None}}, CheckpointError,
         "expected a positive integer in qwen3.block_count, found None"),
        ({"change": {"qwen3.expert_count": 4}}, UnsupportedArchitectureError,
         "qwen3 with experts is not served"),
        ({"change": {"qwen3.rope.dimension_count": 8}}, UnsupportedArchitectureError,
         "8 of 16 dimensions are rotated"),
        ({"change": {"qwen3.rope.scaling.type": "longrope", "qwen3.rope.scaling.factor": 2.0}},
         UnsupportedArchitectureError, "rope.scaling.type is 'longrope': expected none, linear or yarn"),
        ({"change": {"qwen3.block_count": 3}}, CheckpointError, "layer 2 lacks attn_k.weight"),
        ({"without": "blk.1.ffn_up"}, CheckpointError, "layer 1 lacks ffn_up.weight"),
        ({"without": "token_embd"}, CheckpointError, "token_embd.weight is missing"),
        ({"extra": {"blk.0.nextn.weight": np.ones((32, 32), np.float32)}}, UnsupportedArchitectureError,
         "the tensor 'blk.0.nextn.weight' is none of Qwen3ForCausalLM"),
        ({"change": {"tokenizer.ggml.tokens": None}}, CheckpointError, "the tokenizer cannot be read"),
        ({"change": {"tokenizer.ggml.pre": "viking"}}, UnsupportedArchitectureError,
         "tokenizer.ggml.pre is 'viking': expected one of command-r, dbrx, "),
        ({"change": {"tokenizer.ggml.pre": None}}, UnsupportedArchitectureError,
         "tokenizer.ggml.pre is None"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_served_is_told_and_leaves_nothing(
    tmp_path: Path, how: dict[str, Any], kind: type[CheckpointError], why: str
) -> None:
    with pytest.raises(kind, match=why) as refused:
        converted(tmp_path, "qwen3", **how)

    assert refused.value.message.startswith(str(tmp_path / "m.gguf"))
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize("size", [0, 3, 30, 1000, -1])
def test_a_damaged_file_is_told(tmp_path: Path, size: int) -> None:
    file = write_gguf(tiny_checkpoint("qwen3"), tmp_path / "m.gguf")
    file.write_bytes(file.read_bytes()[:size])

    with pytest.raises(
        CheckpointError, match=r"m.gguf is (no whole GGUF file|not whole).*; download it again"
    ):
        convert(file, tmp_path / "m")


def test_another_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + bytes(999))

    with pytest.raises(CheckpointError, match="is no whole GGUF file"):
        convert(tmp_path / "m.gguf", tmp_path / "m")
