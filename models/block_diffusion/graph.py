"""Graph and plan of block diffusion models; see `models.diffusion_text.graph`."""

from pathlib import Path
from typing import Final

from models.block_diffusion.options import BlockDiffusionOptions
from models.checkpoints.claims import CheckpointInfo, Claim
from models.diffusion_text.a2d_classes import CLASSES
from models.diffusion_text.graph import text_graph

PROGRAM: Final = "blocks"
_LLADA2: Final = "LLaDA2MoeModelLM"


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim LLaDA2, and those of dllm-hub's models whose name or `config.json` says that they have blocks."""
    if checkpoint.architecture == _LLADA2:
        return Claim.ARCHITECTURE
    config = checkpoint.config
    if config.get("model_type") not in CLASSES:
        return None
    names = (checkpoint.folder.name, Path(str(config.get("_name_or_path") or "")).name)
    has_blocks = "block_size" in config or any("bd3lm" in name.lower() for name in names)
    return Claim.CHECKPOINT if has_blocks else None


GRAPH: Final = text_graph(
    "block_diffusion",
    program_of=lambda _: PROGRAM,
    options=BlockDiffusionOptions,
    claims=claims,
    serves="block diffusion: LLaDA2MoeModelLM, and dllm-hub's ...-diffusion-bd3lm",
)
