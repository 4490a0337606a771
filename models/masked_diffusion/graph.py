"""Graph and plan of masked diffusion models; see `models.diffusion_text.graph`."""

from typing import Final

from models.checkpoints.claims import CheckpointInfo, Claim
from models.diffusion_text.a2d_classes import CLASSES
from models.diffusion_text.apd_options import APD, VERIFIER_FOLDER
from models.diffusion_text.graph import text_graph
from models.masked_diffusion.options import MaskedDiffusionOptions
from shared.plans import PlanRequest

CANVAS: Final = "canvas"
BLOCK_LENGTH: Final = "block_length"
"""The key of `model_kwargs` with the tokens of a block where the request names none."""
DEFAULT_MAX_TOKENS: Final = 128
"""The length of a canvas whose request has none, as in LLaDA's published examples."""
_ARCHITECTURES: Final = frozenset({"LLaDAModelLM", "DreamModel"})


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim LLaDA, Dream, and dllm-hub's models, unless `models.block_diffusion` has the stronger claim."""
    is_ours = checkpoint.architecture in _ARCHITECTURES or checkpoint.config.get("model_type") in CLASSES
    return Claim.ARCHITECTURE if is_ours else None


def _program_of(request: PlanRequest) -> str:
    return APD if request.options_as(MaskedDiffusionOptions).apd else CANVAS


GRAPH: Final = text_graph(
    "masked_diffusion",
    program_of=_program_of,
    options=MaskedDiffusionOptions,
    default_max_tokens=DEFAULT_MAX_TOKENS,
    claims=claims,
    serves="masked diffusion: LLaDAModelLM, DreamModel, and dllm-hub's ...-diffusion-mdlm",
    kwargs=frozenset({VERIFIER_FOLDER, BLOCK_LENGTH}),
    paths=frozenset({VERIFIER_FOLDER}),
)
