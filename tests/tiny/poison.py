"""A model that some prompts kill: how to serve it, and what to ask of it.

    with deploy.serve(folder, model=str(poison.configuration(folder)), env=poison.environment(folder)):
        ask(poison.kills())           its worker dies of the prompt, whenever it is tried
        ask(poison.kills(after=5))    ... five forwards later: some tokens are out, too few to be progress
        ask(poison.kills(after=40))   ... each time further on: this one comes to an end, like any unlucky one
        ask(poison.hangs())           its engine never comes back; the process lives, and beats

Anything else is answered as by the tiny checkpoint alone. The forwards are the worker's: those of requests
that run beside it count.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml

from tests.tiny import tiny_checkpoint

_PACKAGE: Final = Path(__file__).parent / "poisonous"
_KILLS: Final = "\x01"
_HANGS: Final = "\x02"
"""As `poisonous.nodes` has them, which comes with torch."""
_REST: Final = "Tell me a long story about a wizard."


def kills(*, after: int = 0) -> str:
    """A prompt that its worker dies of, `after` so many more forwards."""
    return _laced(_KILLS, after)


def hangs(*, after: int = 0) -> str:
    """A prompt that its worker's engine hangs of, `after` so many more forwards."""
    return _laced(_HANGS, after)


def _laced(mark: str, after: int) -> str:
    """Twice, and apart: a prompt is computed in pieces of any length, and a mark that is cut is not found."""
    fuse = f"{mark * 3}{after} {_REST}"
    return f"{fuse} {fuse}"


def configuration(folder: Path, *, ranks: Sequence[int] = (0,)) -> Path:
    """A configuration to serve, in `folder`; the model is on each of `ranks`."""
    path = folder / "poisonous.yaml"
    groups = [{"node_names": ["prepare", "llm"], "ranks": list(ranks)}]
    said = {
        "model": "poisonous",
        "checkpoint": str(tiny_checkpoint("qwen3")),
        "max_seq_len": 512,
        "node_groups": groups,
    }
    path.write_text(yaml.safe_dump(said))
    return path


def environment(folder: Path) -> dict[str, str]:
    """The family as pip would have installed it: its package on the path, and its entry point."""
    site = folder / "site"
    info = site / "poisonous-1.0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: poisonous\nVersion: 1.0.0\n")
    (info / "entry_points.txt").write_text("[dalsegno.models]\npoisonous = poisonous\n")
    shutil.copytree(_PACKAGE, site / "poisonous", dirs_exist_ok=True)
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(site), *([before] if before else [])])}
