"""The verifier of adaptive parallel decoding: a language model with the denoiser's vocabulary, as a tower."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from models.checkpoints.files import CheckpointError
from models.checkpoints.progress import Progress, silent
from models.diffusion_text.apd import VERIFIER
from models.diffusion_text.apd_options import VERIFIER_FOLDER
from models.text.tokenizer import load_tokenizer
from models.transformers_lm.loader import load_decoder
from models.transformers_lm.node import DecoderLM


def load_verifier(
    checkpoint: Path,
    kwargs: Mapping[str, Any],
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
) -> dict[str, DecoderLM]:
    """Load the towers of a denoiser: the verifier that `model_kwargs` names; none without it.

    Raises:
        CheckpointError: the verifier's folder is damaged, or its vocabulary is another one.
        UnsupportedArchitectureError: it is no decoder-only language model.
    """
    folder = kwargs.get(VERIFIER_FOLDER)
    if folder is None:
        return {}
    check_vocabularies(checkpoint, Path(folder))
    return {VERIFIER: load_decoder(Path(folder), VERIFIER, device=device, dtype=dtype, progress=progress)}


def check_vocabularies(denoiser: Path, verifier: Path) -> None:
    """Check that each token of the verifier is the same token of the denoiser.

    The denoiser may have more special tokens, such as the mask. The verifier never sees them.

    Raises:
        CheckpointError: a token differs.
    """
    own, _ = load_tokenizer(denoiser)
    other, _ = load_tokenizer(verifier)
    mine, theirs = own.get_vocab(), other.get_vocab()
    special = {token.content for token in own.get_added_tokens_decoder().values()}
    differing = [text for text, id in theirs.items() if mine.get(text) != id]
    missing = [text for text in mine if text not in theirs and text not in special]
    if differing or missing:
        raise CheckpointError(
            f"the verifier {verifier} has another vocabulary than {denoiser}: {len(differing)} of its tokens "
            f"have another id or none there, and it lacks {len(missing)}, such as "
            f"{min([*differing, *missing])!r}; expected a model with the same tokenizer, as Qwen2.5 is "
            "for Dream"
        )
