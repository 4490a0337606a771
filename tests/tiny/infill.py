"""The family whose answers come from a token program: how to serve `tests.tiny.infilling`.

with deploy.serve(folder, model=str(infill.configuration(folder)), env=infill.environment(folder)):
"""

import os
import shutil
from pathlib import Path
from typing import Final

import yaml

from tests.tiny import tiny_checkpoint

_PACKAGE: Final = Path(__file__).parent / "infilling"


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
    """The family as pip would have installed it: its package on the path, and its entry point."""
    site = folder / "site"
    info = site / "infilling-1.0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: infilling\nVersion: 1.0.0\n")
    (info / "entry_points.txt").write_text("[dalsegno.models]\ninfilling = infilling\n")
    shutil.copytree(_PACKAGE, site / "infilling", dirs_exist_ok=True)
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(site), *([before] if before else [])])}
