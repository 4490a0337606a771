"""The family whose answers come from a token program: how to serve `tests.tiny.infilling`.

with deploy.serve(folder, model=str(infill.configuration(folder)), env=infill.environment(folder)):
"""

from pathlib import Path

import yaml

from tests.tiny import tiny_checkpoint
from tests.tiny.families import installed


def configuration(folder: Path) -> Path:
    """A configuration to serve, in `folder`: all nodes on one rank."""
    path = folder / "infilling.yaml"
    settings = {
        "model": "infilling",
        "checkpoint": str(tiny_checkpoint("qwen3")),
        "max_seq_len": 512,
        "node_groups": [{"node_names": ["prepare", "llm"], "ranks": [0]}],
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def environment(folder: Path) -> dict[str, str]:
    """The family as pip would have installed it."""
    return installed("infilling", folder)
