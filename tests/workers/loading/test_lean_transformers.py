"""In processes of their own: an import cannot be taken back."""

import subprocess
import sys

import pytest

from tests.tiny import tiny_checkpoint
from tests.tiny.orpheus import tiny_orpheus

pytestmark = pytest.mark.processes


_SEEN = """
def seen(*names):
    print(*sorted(set(names) & sys.modules.keys()))
"""
_STEPS = f"""
import sys
from workers.loading import lean_transformers
{_SEEN}
"""


def said(script: str) -> list[str]:
    """What the script prints, line by line."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _STEPS + script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_engine_starts_without_compiler_and_distributed_tensors_and_can_have_the_compiler_later() -> None:
    script = f"""
from configs.deployment import DeploymentConfig, NodeGroup
from workers.loading.engines import make_kv_engines
from workers.settings import EngineSettings
groups = [NodeGroup(node_names=["llm"], ranks=[0])]
config = DeploymentConfig(
    model="decoder_lm", checkpoint={str(tiny_checkpoint("qwen3"))!r}, max_seq_len=32, node_groups=groups
)
[engine] = make_kv_engines(config, EngineSettings(device="cpu"), 0, lambda *_: None).values()
seen("transformers", "torch.distributed.tensor", "torch._dynamo.eval_frame", "torch._inductor")
import torch
print(engine.node.reference(torch.tensor([1, 2])).shape[0])
from transformers import masking_utils
with masking_utils.TransformGetItemToIndex() as inside:
    print(type(inside).__name__)
import transformers
print(type(transformers.models).__name__, transformers.models.auto is sys.modules["transformers.models.auto"])
print(transformers.models.LlamaConfig is transformers.LlamaConfig, type(transformers.models).__name__)
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())
seen("torch._dynamo.eval_frame")
print(torch._dynamo is sys.modules["torch._dynamo"], hasattr(torch._dynamo, "__file__"))
"""

    assert said(script) == [
        "transformers",
        "2",
        "TransformGetItemToIndex",
        "Later True",
        "True _LazyModule",
        "2.0",
        "torch._dynamo.eval_frame",
        "True True",
    ]


def test_who_imports_a_part_of_the_compiler_gets_the_real_one_once() -> None:
    script = """
import torch
lean_transformers._install_stub()
import inspect
inspect.getmodule(said := lambda: None)  # looks through all modules
assert torch._dynamo.disable(said) is said and torch._dynamo.disable(recursive=False)(said) is said
print(lean_transformers._is_installed())
import torch._dynamo.config
from torch._dynamo.backends.registry import list_backends
print(lean_transformers._is_installed(), lean_transformers._SUBMODULES in sys.meta_path)
print(torch._dynamo.config is sys.modules["torch._dynamo.config"], "eager" in list_backends(None))
"""

    assert said(script) == ["True", "False False", "True True"]


def test_a_rank_without_a_kv_node_starts_without_transformers() -> None:
    script = f"""
from configs.deployment import DeploymentConfig, NodeGroup
from workers.loading.engines import make_stateless_nodes
from workers.settings import EngineSettings
groups = [NodeGroup(node_names=["LLM"], ranks=[0]), NodeGroup(node_names=["snac_decoder"], ranks=[1])]
config = DeploymentConfig(
    model="orpheus", checkpoint={str(tiny_orpheus())!r}, max_seq_len=64, node_groups=groups
)
make_stateless_nodes(config, EngineSettings(device="cpu"), 1, lambda *_: None)
seen("torch", "transformers")
"""

    assert said(script) == ["torch"]
