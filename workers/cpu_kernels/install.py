"""Compiles the kernels while the package is built: a hook of hatchling's (`pyproject.toml`).

For the processor it is built on, or with `DALSEGNO_KERNELS=all` for all there are: an image runs elsewhere.
Without a compiler nothing is compiled and nothing fails: a worker then says that torch computes.
"""

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

# There while a package is built, and only then.
from hatchling.builders.hooks.plugin.interface import (  # type: ignore[import-not-found]
    BuildHookInterface,
)


class KernelsHook(BuildHookInterface):  # type: ignore[misc]
    """Makes the libraries, and the wheel one of this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        folder = Path(self.root) / "workers" / "cpu_kernels"
        sys.path.insert(0, str(folder))
        try:
            import build  # type: ignore[import-not-found] # noqa: PLC0415 - by its path: the package is not there
        finally:
            sys.path.remove(str(folder))
        built = folder / "built"
        has_all = os.environ.get("DALSEGNO_KERNELS") == "all" and bool(build.processor())
        wanted = build.VARIANTS if has_all else build.variants_for(build.processor())[:1]
        for variant in wanted:
            if (built / build.file_name(variant)).is_file():
                continue
            try:
                build.build(variant, built)
            except (build.BuildError, OSError) as error:
                self.app.display_warning(f"the CPU kernels for {variant.name} were not compiled: {error}")
        build.clean(built)
        if any(built.glob("*.so")):
            build_data["artifacts"].append("workers/cpu_kernels/built/*.so")
            build_data["pure_python"] = False
            # Loaded by ctypes: any Python of this platform will do.
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
