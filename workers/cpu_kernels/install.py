"""A hatchling build hook (`pyproject.toml`) that compiles the kernels while the package is built.

It compiles for this machine's processor, or for all variants with `DALSEGNO_KERNELS=all`, because an image
runs on other machines. Without a compiler it warns and the build succeeds; a worker then logs that torch
computes the layers.
"""

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

# Installed only while a package is built.
from hatchling.builders.hooks.plugin.interface import (  # type: ignore[import-not-found]
    BuildHookInterface,
)


class KernelsHook(BuildHookInterface):  # type: ignore[misc]
    """Adds the compiled libraries to the wheel, and tags the wheel for this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        folder = Path(self.root) / "workers" / "cpu_kernels"
        sys.path.insert(0, str(folder))
        try:
            import compilation  # type: ignore[import-not-found] # noqa: PLC0415 - the package is not installed yet
        finally:
            sys.path.remove(str(folder))
        built = folder / "built"
        has_all = os.environ.get("DALSEGNO_KERNELS") == "all" and bool(compilation.processor_flags())
        wanted = (
            compilation.VARIANTS if has_all else compilation.variants_for(compilation.processor_flags())[:1]
        )
        for variant in wanted:
            if (built / compilation.file_name(variant)).is_file():
                continue
            try:
                compilation.build(variant, built)
            except (compilation.BuildError, OSError) as error:
                self.app.display_warning(f"the CPU kernels for {variant.name} were not compiled: {error}")
        compilation.clean(built)
        if any(built.glob("*.so")):
            build_data["artifacts"].append("workers/cpu_kernels/built/*.so")
            build_data["pure_python"] = False
            # ctypes loads the libraries, so any Python version of this platform works.
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
