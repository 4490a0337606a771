"""The torch nodes of diffusers' pipelines: text encoder, denoiser, VAE; or a whole pipeline in one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from models.checkpoints.progress import Progress, silent
from models.diffusion_pipelines.components import DENOISERS
from models.diffusion_pipelines.denoiser import MAX_BATCH, MAX_RUNS, Denoiser
from models.diffusion_pipelines.loading import Loader
from models.diffusion_pipelines.text_encoder import TextEncoder
from models.diffusion_pipelines.vae_decoder import VaeDecoder
from models.diffusion_pipelines.whole import WholePipeline
from shared.errors import BugError

_OTHER_NAMES: Final = {"dit": "denoiser"}
"""M*'s names of nodes."""


def load(
    checkpoint: Path,
    node: str,
    *,
    device: str,
    dtype: str,
    progress: Progress = silent,
    kwargs: Mapping[str, Any],
) -> TextEncoder | Denoiser | VaeDecoder | WholePipeline:
    """Load one node of a folder with a `model_index.json`.

    Args:
        checkpoint: the folder.
        device: of the node, such as `cpu` or `cuda`.
        dtype: of text encoders and denoiser; `auto`: the one that the denoiser is stored in, where it suits.
        progress: is called with the bytes read, and the component.
        node: `text_encoder`, `denoiser` (or `dit`), `vae_decoder`, or `pipeline`, which is all of them.
        kwargs: `vae_tiling`, `vae_slicing`: decode in tiles, or picture by picture, in less memory;
            `safety_checker`: False to load a pipeline without the one that it has; `max_batch`, `max_runs`:
            of the denoiser.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    with_checker = bool(kwargs.get("safety_checker", True))
    loader = Loader(checkpoint, device=device, dtype=dtype, progress=progress, safety_checker=with_checker)
    parts = loader.index.components
    memory = {"tiling": bool(kwargs.get("vae_tiling")), "slicing": bool(kwargs.get("vae_slicing"))}
    match _OTHER_NAMES.get(node, node):
        case "text_encoder":
            texts = [name for name, part in parts.items() if part.is_text]
            return TextEncoder(loader.pipeline(texts) if texts else None)
        case "denoiser":
            pipeline = loader.pipeline(
                [name for name in (*DENOISERS, "vae", "image_encoder") if name in parts]
            )
            max_batch = int(kwargs.get("max_batch", MAX_BATCH))
            max_runs = int(kwargs.get("max_runs", MAX_RUNS))
            return Denoiser(pipeline, loader.device, max_batch=max_batch, max_runs=max_runs)
        case "vae_decoder":
            decoders = [name for name in ("vae", "sound_tokenizer") if name in parts]
            return VaeDecoder(loader.pipeline(decoders), safety_checker=loader.safety_checker, **memory)
        case "pipeline":
            return WholePipeline(loader.pipeline(list(parts)), safety_checker=loader.safety_checker, **memory)
        case _:
            raise BugError(f"expected a node of a pipeline, found {node!r}")
