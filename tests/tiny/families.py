"""Families of this folder, as pip would have installed them."""

import os
import shutil
from pathlib import Path


def installed(family: str, folder: Path) -> dict[str, str]:
    """The environment with a family's package on the path, and its entry point, both in `folder`."""
    site = folder / "site"
    info = site / f"{family}-1.0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {family}\nVersion: 1.0.0\n")
    (info / "entry_points.txt").write_text(f"[dalsegno.models]\n{family} = {family}\n")
    shutil.copytree(Path(__file__).parent / family, site / family, dirs_exist_ok=True)
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(site), *([before] if before else [])])}
