"""The sampling of the code predictor of Qwen3-Omni. Pure."""

from models.qwen3_omni.options import Qwen3OmniOptions
from models.sequence_request import SamplingParams


def predictor_sampling(options: Qwen3OmniOptions) -> SamplingParams:
    """The sampling of the other codes of each frame."""
    temperature = options.code_predictor_temperature
    if temperature is None:
        temperature = 1.0 if options.talker_temperature else 0.0
    return SamplingParams(
        temperature=temperature, top_k=options.code_predictor_top_k, top_p=options.code_predictor_top_p
    )
