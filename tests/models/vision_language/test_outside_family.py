"""The example of docs/adding-a-model.md: a vision-language class that another package adds with the kit."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, CLIPImageProcessorPil, VipLlavaForConditionalGeneration

from models.base import Item
from models.checkpoints.claims import CheckpointInfo, Claim
from models.sequence_request import PromptPart
from shared.tensors import read_ids
from tests.models.vision_language.oracle import Pictures, picture, user
from tests.tiny import vision
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import ids, run
from workers.data_plane.arrays import to_array
from workers.kv_engine.sequence_spec import SequenceSpec

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "vip_llava"
IMAGE_TOKENS = 16
TOKENS = 16
SIZES = {"num_blocks": 32, "block_size": 8, "max_step_tokens": 64, "max_sequences": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    llava = vision.VISION_MODELS["llava"]

    def config(token_ids: Any) -> dict[str, Any]:
        of_llava = {**llava.config(token_ids), "vision_feature_layer": [-2, -1]}
        return {name: one for name, one in of_llava.items() if name != "vision_feature_select_strategy"}

    model = replace(llava, architecture="VipLlavaForConditionalGeneration", config=config)
    return vision.write_model(tmp_path_factory.mktemp("vip"), model)


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    sys.path.insert(0, str(EXAMPLE))
    yield
    sys.path.remove(str(EXAMPLE))


def test_it_claims_its_checkpoints(checkpoint: Path) -> None:
    claims = import_module("vip_llava.graph").GRAPH.claims

    assert claims(CheckpointInfo.read(checkpoint)) == Claim.ARCHITECTURE


def test_it_answers_as_generate_does(checkpoint: Path) -> None:
    nodes, reader = import_module("vip_llava.nodes"), Pictures()
    processing = import_module("vip_llava.processing").load(checkpoint, max_seq_len=512, media=reader)
    seen = picture(3, 40, 60)
    files = [msgspec.to_builtins(reader.add(seen))]
    args = {"inputs": {"messages": [user(0, "What is it?")], "files": files}, "params": {}}

    prepared = processing.run("prepare", "k", {}, args)
    pixels = torch.from_numpy(prepared.outputs["pixels"])
    [rows] = nodes.load(checkpoint, "vision_encoder").run(
        [Item(inputs={"pixels": pixels}, args=prepared.facts)]
    )
    spec = SequenceSpec(
        key="a",
        prompt_ids=read_ids(prepared.handle("token_ids")),
        max_tokens=TOKENS,
        parts=msgspec.convert(prepared.facts["parts"], list[PromptPart]),
        embeds=to_array(rows.outputs["embeds"]),
    )
    found = run(make_engine(nodes.load(checkpoint, "llm"), **SIZES), [spec])

    assert ids(found["a"]) == _generated(checkpoint, Image.fromarray(seen))


def _generated(checkpoint: Path, image: Image.Image) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = torch.tensor([tokenizer(text.replace("<image>", "<image>" * IMAGE_TOKENS))["input_ids"]])
    model = VipLlavaForConditionalGeneration.from_pretrained(checkpoint).eval()
    made = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        **CLIPImageProcessorPil.from_pretrained(checkpoint)(image, return_tensors="pt"),
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    answer: list[int] = made[0, prompt.shape[1] :].tolist()
    assert len(set(answer)) > TOKENS // 2  # else the comparison shows nothing
    return answer
