"""The core's view of a configuration, and what a conductor has no need of."""

import subprocess
import sys

import pytest

from conductor.deployment import deployment_of
from configs.deployment import DeploymentConfig
from configs.placement import NodeGroup
from models import registry
from tests.conductor.speech import group


def test_a_configuration_says_where_nodes_may_run_and_which_keep_keys_and_values() -> None:
    config = DeploymentConfig(
        model="decoder_lm",
        checkpoint="/nowhere",
        name="demo",
        max_seq_len=64,
        max_attempts=5,
        node_groups=[
            NodeGroup(node_names=["prepare"], ranks=[0]),
            NodeGroup(node_names=["llm"], ranks=[1, 2]),
        ],
    )

    found = deployment_of(config, max_event_bytes=4096)

    assert found.groups == (group("prepare", 0), group("llm", 1, 2))
    assert found.kv_nodes == {"llm"}
    assert (found.limits.kv_tokens, found.limits.max_attempts, found.limits.max_event_bytes) == (64, 5, 4096)
    assert (found.model, found.graph_digest) == ("demo", registry.graph("decoder_lm").digest)


@pytest.mark.processes
def test_the_conductor_imports_neither_torch_nor_a_tokenizer_also_where_it_knows_a_graph() -> None:
    code = (
        "import sys, conductor.process; from models import registry; registry.graph('decoder_lm'); "
        "print(sorted(set(sys.modules) & {'torch', 'transformers', 'tokenizers', 'numpy', 'jinja2'}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "[]"
