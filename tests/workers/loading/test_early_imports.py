"""In a process of its own: an import cannot be taken back."""

import subprocess
import sys

import pytest

from tests.tiny import tiny_checkpoint

pytestmark = pytest.mark.processes

_SCRIPT = f"""
import os, sys
import torch
def refuse(*_):
    raise AssertionError("a GPU was looked for")
torch._C._cuda_getDeviceCount = torch._C._cuda_init = refuse
from configs.deployment import DeploymentConfig, NodeGroup
from workers.loading.early_imports import import_modules
groups = [NodeGroup(node_names=["llm"], ranks=[0])]
config = DeploymentConfig(
    model="decoder_lm", checkpoint={str(tiny_checkpoint("qwen3"))!r}, max_seq_len=32, node_groups=groups
)
import_modules(config)
if (pid := os.fork()) == 0:
    os._exit(0)
os.waitpid(pid, 0)
print(len(os.listdir("/proc/self/task")), "thread")
before = set(sys.modules)
del torch._C._cuda_getDeviceCount
from workers.loading.engines import make_kv_engines
from workers.settings import EngineSettings
make_kv_engines(config, EngineSettings(device="cpu"), 0, lambda *_: None)
new = {{".".join(name.split(".")[:3]) for name in sys.modules.keys() - before}}
print(*sorted(name for name in new if not name.startswith(("models.", "workers.", "torch."))))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="there are templates on Linux only")
def test_the_imports_start_no_thread_look_for_no_gpu_and_leave_the_architecture_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["1 thread", "transformers.models.qwen3"], done.stderr
