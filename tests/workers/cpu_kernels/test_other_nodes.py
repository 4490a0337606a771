"""Nodes around a language model that the kernels compute: robot policies, images before texts.

Their tiny checkpoints have heads of 16, which the kernels leave to torch; here they have 32.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from models import registry
from models.base import Item, StatelessResult
from models.pi0 import nodes as pi0
from tests.models.robot_policy import naive
from tests.models.vision_language.axes_oracle import served
from tests.models.vision_language.test_axes_families import NEW_TOKENS, PLAIN, expected
from tests.tiny import pi, vision_axes
from tests.tiny.vision_axes import AxesFamily, tiny_axes_checkpoint
from tests.workers.cpu_kernels.libraries import NAMES, library
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import ids, run
from tests.workers.kv_engine.programs.test_programs import serve
from workers.cpu_kernels import library as kernels
from workers.cpu_kernels.decoder import NativeDecoder, use_cpu_kernels
from workers.data_plane.arrays import to_array, to_tensor
from workers.kv_engine.outputs import ProgramOutput
from workers.kv_engine.programs.spec import ProgramSpec

_CACHED = (pi.tiny_pi0, tiny_axes_checkpoint, expected, served)


@pytest.fixture(autouse=True)
def _larger_heads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "load", lambda: library(NAMES[-1]))
    for tiny in (pi, vision_axes):
        monkeypatch.setitem(tiny._TEXT, "head_dim", 32)
    for cached in _CACHED:
        cached.cache_clear()
    yield
    for cached in _CACHED:
        cached.cache_clear()


@pytest.mark.slow
def test_a_robot_policy_has_the_same_actions() -> None:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(2, 3, pi.IMAGE_SIZE, pi.IMAGE_SIZE, generator=generator)
    state = torch.randn(pi.STATE_DIM, generator=generator)
    ids_of_text = torch.tensor([2, 9, 77, 8, 130, 131], dtype=torch.int32)

    def actions(*, by_kernels: bool) -> torch.Tensor:
        encoder, node = naive.load(pi0, pi.tiny_pi0())
        [seen] = encoder.run([Item(inputs={"pixels": pixels}, args={})])
        assert isinstance(seen, StatelessResult)
        computed: Any = use_cpu_kernels(node, threads=1) if by_kernels else node
        assert isinstance(computed, NativeDecoder) == by_kernels
        engine = make_engine(computed, num_blocks=100, block_size=8, max_step_tokens=64, max_sequences=4)
        rows = {"rows": seen.outputs["rows"], "token_ids": ids_of_text, "state": state}
        inputs = {name: to_array(tensor) for name, tensor in rows.items()}
        [output] = serve(engine, [ProgramSpec(key="p", program="actions", inputs=inputs, args={}, seed=3)])[
            "p"
        ]
        assert isinstance(output, ProgramOutput)
        return to_tensor(output.values["actions"], torch.device("cpu"))

    assert torch.allclose(actions(by_kernels=True), actions(by_kernels=False), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "paligemma", "paligemma2"])
@pytest.mark.parametrize("name", PLAIN)
def test_images_before_a_text_are_seen_as_by_transformers(family: AxesFamily, name: str) -> None:
    folder = tiny_axes_checkpoint(family)
    node = registry.module(registry.family_of(folder), "nodes").load(folder, "llm")
    by_kernels = use_cpu_kernels(node, threads=1)
    assert isinstance(by_kernels, NativeDecoder)
    engine = make_engine(by_kernels, num_blocks=256, block_size=8, max_step_tokens=200, max_sequences=4)

    spec = served(family).spec("k", *PLAIN[name], max_tokens=NEW_TOKENS)
    assert ids(run(engine, [spec])["k"]) == expected(family, name)
