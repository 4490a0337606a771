"""Language models of multimodal checkpoints: tokens equal to `generate` of the whole model, over texts."""

from pathlib import Path
from typing import get_args

import pytest
import torch
import transformers

from models import registry
from models.checkpoints.files import CheckpointError, read_json
from models.decoder_lm import nodes
from models.decoder_lm.multimodal import LANGUAGE_MODELS
from tests.tiny import tiny_checkpoint
from tests.tiny.composite import Composite, composite_checkpoint, written_by_names
from tests.tiny.files import write_json
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import ids, run
from workers.kv_engine.sequence_spec import SequenceSpec

NAMES: tuple[Composite, ...] = get_args(Composite)
NEW_TOKENS = 24
PROMPTS = [list(range(20 + start, 90 + 3 * start)) for start in (0, 7, 30)]


def served(folder: Path) -> list[list[int]]:
    """The answers of our engine to the prompts, staggered and in chunks of nine tokens."""
    engine = make_engine(nodes.load(folder), num_blocks=128, block_size=8, max_step_tokens=9, max_sequences=4)
    specs = [
        SequenceSpec(key=str(number), prompt_ids=prompt, max_tokens=NEW_TOKENS)
        for number, prompt in enumerate(PROMPTS)
    ]
    found = run(engine, specs, every=3)
    return [ids(found[str(number)]) for number in range(len(PROMPTS))]


def generated(model: transformers.PreTrainedModel) -> list[list[int]]:
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)[
            0, len(prompt) :
        ].tolist()
        for prompt in PROMPTS
    ]


@pytest.mark.parametrize("name", NAMES)
def test_answers_to_texts_are_those_of_the_whole_model(name: Composite) -> None:
    folder = composite_checkpoint(name)
    architecture = read_json(folder / "config.json")["architectures"][0]

    expected = generated(getattr(transformers, architecture).from_pretrained(folder))

    assert registry.family_of(folder) == "decoder_lm"
    assert served(folder) == expected
    assert len({token for answer in expected for token in answer}) >= 8


def test_towers_that_transformers_cannot_build_are_not_needed(tmp_path: Path) -> None:
    """The images of Gemma 3n are encoded by timm, which is not installed."""
    source = tiny_checkpoint("gemma3n")
    folder = written_by_names(tmp_path, "gemma3n", "Gemma3nForConditionalGeneration", "gemma3n")

    assert served(folder) == generated(transformers.Gemma3nForCausalLM.from_pretrained(source))


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_names_of_any_time_are_read(tmp_path: Path, prefix: str) -> None:
    folder = written_by_names(
        tmp_path, "cohere2", "Cohere2VisionForConditionalGeneration", "cohere2_vision", prefix
    )

    assert served(folder) == served(tiny_checkpoint("cohere2"))


def test_every_architecture_is_tested() -> None:
    tested = {read_json(composite_checkpoint(name) / "config.json")["architectures"][0] for name in NAMES}

    assert tested | {"Gemma3nForConditionalGeneration"} == LANGUAGE_MODELS.keys()


def test_what_is_not_served_is_remarked() -> None:
    remarks = registry.graph("decoder_lm").remarks
    assert remarks is not None

    [remark] = remarks(composite_checkpoint("gemma4"), {})

    assert "requests with images, videos or sound are refused" in remark
    assert remarks(tiny_checkpoint("gemma4"), {}) == []


def test_a_config_without_its_language_model_is_named(tmp_path: Path) -> None:
    write_json(
        tmp_path / "config.json",
        {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"},
    )

    with pytest.raises(CheckpointError, match="expected text_config"):
        nodes.examine(tmp_path, "llm")
