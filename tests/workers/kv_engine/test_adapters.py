"""LoRA adapters in the engine: mixed with each other and the plain model, each answers as it does alone."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoints.adapters import CONFIG, WEIGHTS, AdapterError, adapter_at
from models.decoder_lm.nodes import DecoderLM, load
from shared.adapters import Adapter
from shared.errors import ClientError
from tests.tiny import Family, tiny_checkpoint
from tests.tiny.adapters import generate, make_adapter, merged
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import ids, prompts, run
from workers.kv_engine.adapters import MEMORY_BYTES, NoRoomForAdapterError
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.kv_engine.speculative.proposer import PromptLookup

COMMON = list(range(20, 60))
TOKENS = 24
NAMES = ("", "sql", "poet", "wide")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter | None]:
    """The plain model and three adapters of qwen3, whose ranks, scales and modules differ."""
    folder, checkpoint = tmp_path_factory.mktemp("adapters"), tiny_checkpoint("qwen3")
    return {
        "": None,
        "sql": make_adapter(folder / "sql", checkpoint, seed=1),
        "poet": make_adapter(
            folder / "poet", checkpoint, seed=2, rank=2, modules=("q_proj", "v_proj"), size=0.6
        ),
        "wide": make_adapter(
            folder / "wide",
            checkpoint,
            seed=3,
            rank=8,
            use_rslora=True,
            size=0.15,
            rank_pattern={"layers.1.mlp.down_proj": 3},
            alpha_pattern={"layers.0.self_attn.o_proj": 40},
        ),
    }


def engine(node: DecoderLM, **changes: Any) -> KVEngine:
    sizes: dict[str, Any] = {
        "num_blocks": 200,
        "block_size": 8,
        "max_step_tokens": 24,
        "max_sequences": 8,
        "adapter_bytes": MEMORY_BYTES,
    }
    return make_engine(node, **(sizes | changes))


def spec(key: str, prompt: list[int], adapter: Adapter | None, max_tokens: int = TOKENS) -> SequenceSpec:
    return SequenceSpec(key=key, prompt_ids=prompt, max_tokens=max_tokens, adapter=adapter)


@pytest.fixture(scope="module")
def asked(adapters: dict[str, Adapter | None]) -> list[SequenceSpec]:
    """Two prompts with a common beginning for each, interleaved."""
    texts = [[*COMMON, *text] for text in prompts(2, seed=9)]
    return [
        spec(f"{name}.{number}", text, adapters[name]) for number, text in enumerate(texts) for name in NAMES
    ]


@pytest.fixture(scope="module")
def expected(asked: list[SequenceSpec], adapters: dict[str, Adapter | None]) -> dict[str, list[int]]:
    """The answers of transformers with merged weights."""
    models = {name: merged(tiny_checkpoint("qwen3"), adapters[name]) for name in NAMES}
    return {
        one.key: generate(models[one.key.partition(".")[0]], one.prompt_ids, one.max_tokens) for one in asked
    }


def answers(one: KVEngine, asked: list[SequenceSpec], **how: Any) -> dict[str, list[int]]:
    return {key: ids(outputs) for key, outputs in run(one, asked, **how).items()}


def test_the_adapters_change_the_answers(expected: dict[str, list[int]]) -> None:
    firsts = [tuple(expected[f"{name}.0"]) for name in NAMES]
    assert len(set(firsts)) == len(NAMES)
    assert all(len(set(one)) > 3 for one in firsts)


@pytest.mark.parametrize("every", [0, 2])
def test_mixed_in_one_batch_each_answers_as_merged_weights_do(
    qwen3: DecoderLM, asked: list[SequenceSpec], expected: dict[str, list[int]], every: int
) -> None:
    one = engine(qwen3)
    assert answers(one, asked, every=every) == expected
    # A second time, prompts are found in the cache: those of the same adapter.
    before = one.stats().cache.hits
    assert answers(one, [replace(ask, key=f"{ask.key}+") for ask in asked]) == {
        f"{key}+": found for key, found in expected.items()
    }
    assert one.stats().cache.hits > before


def test_preempted_sequences_continue_with_their_adapter(
    qwen3: DecoderLM, asked: list[SequenceSpec], expected: dict[str, list[int]]
) -> None:
    one = engine(qwen3, num_blocks=40, max_step_tokens=400, decode_slowdown_limit=None)
    assert answers(one, asked) == expected
    assert one.stats().cache.preemptions


def test_a_resumed_sequence_continues_with_its_adapter(
    qwen3: DecoderLM, asked: list[SequenceSpec], expected: dict[str, list[int]]
) -> None:
    resumed = [replace(ask, prefix_ids=expected[ask.key][:5]) for ask in asked]
    assert answers(engine(qwen3), resumed) == {key: found[5:] for key, found in expected.items()}


def test_drafted_tokens_are_verified_with_the_adapter(
    qwen3: DecoderLM, asked: list[SequenceSpec], expected: dict[str, list[int]]
) -> None:
    assert answers(engine(qwen3, proposer=PromptLookup()), asked) == expected


def test_with_a_shared_cache_the_answers_would_be_wrong(
    qwen3: DecoderLM,
    asked: list[SequenceSpec],
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SequenceSpec, "shared_root", property(lambda self: self.cache_root))
    assert answers(engine(qwen3), asked) != expected


def test_with_another_scale_the_answers_would_be_wrong(
    qwen3: DecoderLM, asked: list[SequenceSpec], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    ask = next(one for one in asked if one.key == "sql.0")
    assert ask.adapter is not None
    folder = shutil.copytree(ask.adapter.folder, tmp_path / "sql")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"lora_alpha": 6}))
    other = replace(ask, adapter=adapter_at("sql", folder))
    assert answers(engine(qwen3), [other])["sql.0"] != expected["sql.0"]


MODULES = {
    "deepseek_v3": ("kv_a_proj_with_mqa", "o_proj", "up_proj", "down_proj"),
    "deepseek_v32": ("wq_b", "weights_proj", "kv_a_proj_with_mqa", "o_proj"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
}


@pytest.mark.parametrize(
    "family",
    ["llama", "gemma3", "gpt_oss", "phi3", "mixtral", "deepseek_v3", "deepseek_v32", "qwen3_moe", "gemma3n"],
)
def test_other_architectures_take_adapters(family: Family, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(family)
    modules = MODULES.get(family, ("q_proj", "o_proj"))
    adapter = make_adapter(tmp_path / "one", checkpoint, seed=5, modules=modules)
    node, text = load(checkpoint), COMMON[:30]
    found = answers(engine(node), [spec("with", text, adapter), spec("without", text, None)])
    assert found["with"] == generate(merged(checkpoint, adapter), text, TOKENS)
    assert found["without"] == generate(merged(checkpoint, None), text, TOKENS)
    assert found["with"] != found["without"]


# ---- the limit of memory ---------------------------------------------------------------------------


def test_beyond_the_limit_the_least_recently_used_adapter_makes_room(
    qwen3: DecoderLM, asked: list[SequenceSpec], expected: dict[str, list[int]]
) -> None:
    one = engine(qwen3, adapter_bytes=_bytes_of(asked[1]) + _bytes_of(asked[3]))
    for ask in (*asked[1:4], asked[5]):  # sql, poet, wide, and sql again
        assert answers(one, [ask])[ask.key] == expected[ask.key]


def test_an_adapter_without_room_is_refused_and_the_running_one_goes_on(
    qwen3: DecoderLM, asked: list[SequenceSpec], expected: dict[str, list[int]]
) -> None:
    one = engine(qwen3, adapter_bytes=_bytes_of(asked[1]))
    one.add(asked[1])
    with pytest.raises(NoRoomForAdapterError, match=r"'wide' needs \d+ bytes, but those of running"):
        one.add(asked[3])
    found: list[int] = []
    while one.has_work:
        found += ids(one.step())
    assert found == expected[asked[1].key]


def _bytes_of(ask: SequenceSpec) -> int:
    assert ask.adapter is not None
    return sum(tensor.nbytes for tensor in load_file(Path(ask.adapter.folder) / WEIGHTS).values())


# ---- damaged and foreign files ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"r": 0}, "expected a positive whole number r"),
        ({"r": 5}, "r = 5"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters is"),
    ],
)
def test_what_is_not_served_is_refused_by_its_field(
    adapters: dict[str, Adapter | None], tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    sql = adapters["sql"]
    assert sql is not None
    folder = shutil.copytree(sql.folder, tmp_path / "changed")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | fields))
    with pytest.raises(AdapterError, match=message):
        adapter_at("changed", folder)


def test_damaged_and_changed_files_are_refused_and_nothing_is_lost(
    qwen3: DecoderLM, asked: list[SequenceSpec], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    ask = asked[1]
    assert ask.adapter is not None
    folder = shutil.copytree(ask.adapter.folder, tmp_path / "sql")
    adapter = adapter_at("sql", folder)
    one = engine(qwen3)
    one.add(asked[0])
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-100])
    with pytest.raises(AdapterError, match="not whole"):
        one.add(replace(ask, adapter=adapter))
    save_file(
        {name: 2 * t for name, t in load_file(Path(ask.adapter.folder) / WEIGHTS).items()}, folder / WEIGHTS
    )
    with pytest.raises(AdapterError, match=f"the weights {adapter.digest[:12]} are gone"):
        one.add(replace(ask, adapter=adapter))
    (folder / WEIGHTS).unlink()
    with pytest.raises(AdapterError, match="cannot be read"):
        one.add(replace(ask, adapter=adapter))
    (folder / WEIGHTS).write_bytes(whole)
    one.add(replace(ask, adapter=adapter))
    found: dict[str, list[int]] = {asked[0].key: [], ask.key: []}
    while one.has_work:
        for output in one.step():
            found[output.key] += ids([output])
    assert found == {key: expected[key] for key in found}


def test_an_adapter_of_another_model_is_refused(qwen3: DecoderLM, tmp_path: Path) -> None:
    other = make_adapter(tmp_path / "other", tiny_checkpoint("phi3"), seed=1, modules=("qkv_proj",))
    with pytest.raises(AdapterError, match=r"made for another model.*qkv_proj.*does not exist"):
        engine(qwen3).add(spec("a", COMMON, other))


def test_a_module_whose_weights_are_used_without_it_is_refused(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("deepseek_v3")
    adapter = make_adapter(tmp_path / "latent", checkpoint, seed=1, modules=("kv_b_proj",))
    with pytest.raises(AdapterError, match=r"kv_b_proj, which is not computed as a layer"):
        engine(load(checkpoint)).add(spec("a", COMMON, adapter))


def test_embeddings_and_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="it adapts lm_head"):
        make_adapter(tmp_path / "head", tiny_checkpoint("qwen3"), seed=1, modules=("lm_head",))


def test_an_engine_without_room_for_adapters_refuses_them(
    qwen3: DecoderLM, asked: list[SequenceSpec]
) -> None:
    with pytest.raises(ClientError, match="takes no adapters"):
        engine(qwen3, adapter_bytes=0).add(asked[1])


def test_steps_without_adapters_are_computed_as_before(qwen3: DecoderLM, asked: list[SequenceSpec]) -> None:
    """The hooks of a loaded adapter change no bit of the plain model's logits."""
    one, text = engine(qwen3), torch.tensor(COMMON)
    before = qwen3.reference(text)
    answers(one, [asked[1]])
    assert torch.equal(qwen3.reference(text), before)
