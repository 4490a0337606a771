"""The folder of a pipeline: its class, and the configurations of its parts. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from models.checkpoints.files import read_json_if_present
from models.diffusion_pipelines.components import Index, read_index

_VIDEO_WORDS: Final = (
    "video", "2v", "wan", "ltx", "cosmos", "mochi", "allegro", "latte", "animate", "skyreels", "helios",
    "consisid", "chronoedit", "lucyedit", "sanawm", "anyflow", "piapipeline",
)  # fmt: skip
"""Parts of the names of diffusers' classes that make videos (0.42)."""
_DEFAULT_SCALE: Final = 8


@dataclass(frozen=True, slots=True)
class PipelineFolder:
    """A folder with a `model_index.json`.

    Attributes:
        index: its content.
    """

    path: Path
    index: Index
    _configs: dict[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, path: Path) -> "PipelineFolder":
        """Read the folder.

        Raises:
            CheckpointError: `model_index.json` is missing or damaged.
            UnsupportedArchitectureError: the pipeline has code of its own.
        """
        return cls(path, read_index(path))

    @property
    def kind(self) -> str:
        """The name of the class."""
        return self.index.kind

    @property
    def makes_videos(self) -> bool:
        """True if the name of the class says so."""
        return makes_videos(self.kind)

    def config(self, part: str) -> Mapping[str, Any]:
        """The configuration of a part; empty for a part that it lacks.

        Raises:
            CheckpointError: the file is damaged.
        """
        if part not in self._configs:
            self._configs[part] = read_json_if_present(self.path / part / "config.json")
        return self._configs[part]

    @property
    def image_scale(self) -> int:
        """The pixels to a latent, along a side, of a VAE of images."""
        channels = self.config("vae").get("block_out_channels")
        return 2 ** (len(channels) - 1) if channels else _DEFAULT_SCALE

    @property
    def video_scale(self) -> int:
        """The pixels to a latent, along a side, of a VAE of videos of Wan's family."""
        vae = self.config("vae")
        if (stated := vae.get("scale_factor_spatial")) is not None:
            return int(stated)
        halvings = vae.get("temperal_downsample")  # diffusers' spelling
        return int(2 ** len(halvings)) if halvings else _DEFAULT_SCALE


def makes_videos(kind: str) -> bool:
    """Return whether a class makes videos, by its name."""
    name = kind.lower()
    return "texttoimage" not in name and any(word in name for word in _VIDEO_WORDS)
