"""A model that writes and draws: how to serve the family `tests.tiny.flowing`.

with deploy.serve(folder, model=str(flow.configuration(folder)), env=flow.environment(folder)):
"""

import os
import shutil
from pathlib import Path
from typing import Final

import yaml

from tests.tiny import tiny_checkpoint

_PACKAGE: Final = Path(__file__).parent / "flowing"


def configuration(folder: Path) -> Path:
    """A configuration to serve, in `folder`: all nodes on one rank."""
    path = folder / "flowing.yaml"
    settings = {
        "model": "flowing",
        "checkpoint": str(tiny_checkpoint("qwen3")),
        "max_seq_len": 512,
        "node_groups": [{"node_names": ["prepare", "llm", "noise", "decoder"], "ranks": [0]}],
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def environment(folder: Path) -> dict[str, str]:
    """The family as pip would have installed it: its package on the path, and its entry point."""
    site = folder / "site"
    info = site / "flowing-1.0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flowing\nVersion: 1.0.0\n")
    (info / "entry_points.txt").write_text("[dalsegno.models]\nflowing = flowing\n")
    shutil.copytree(_PACKAGE, site / "flowing", dirs_exist_ok=True)
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(site), *([before] if before else [])])}
