"""The request parameters of adaptive parallel decoding. No torch."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta

from shared.errors import ClientError

APD: Final = "apd"
"""The name of the token program."""
VERIFIER_FOLDER: Final = "verifier"
"""The key of `model_kwargs` that names the verifier's checkpoint folder."""


class ApdOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of families with a verifier; they inherit this struct.

    Attributes:
        apd: decode by adaptive parallel decoding: drafts left to right, accepted by the verifier that the
            deployment names (`model_kwargs: {verifier: FOLDER}`).
        apd_verifier_weight: the verifier's share of the product of both distributions, 1 - R in the paper; 0
            accepts every draft.
        apd_mixture_weight: the denoiser's share R, in place of `apd_verifier_weight`.
        apd_window: the denoiser computes so many of the last tokens again, W in the paper; without it all of
            them, which is exact.
        apd_lookahead: the most drafts of a round, M in the paper.
        apd_threshold: accept only drafts whose probability in the product is at least this; the paper has 0.
    """

    apd: bool = False
    apd_verifier_weight: Annotated[float, Meta(ge=0, le=1)] = 0.3
    apd_mixture_weight: Annotated[float, Meta(ge=0, le=1)] | None = None
    apd_window: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    apd_lookahead: Annotated[int, Meta(ge=1, le=4096)] = 100
    apd_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.0

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {
        "apd_max_parallel": "apd_lookahead",
        "ar_weight": "apd_verifier_weight",
        "enable_apd": "apd",
        "hybrid_ar_weight": "apd_verifier_weight",
        "kv_window": "apd_window",
        "max_lookahead": "apd_lookahead",
        "verifier_weight": "apd_verifier_weight",
    }
    """The names of the paper's code and of dfastllm for these options."""


def check_apd(options: ApdOptions, given: dict[str, Any]) -> None:
    """Check options that exclude one another; `given` are those of the request.

    Raises:
        ClientError: both weights are given.
    """
    if options.apd_mixture_weight is not None and "apd_verifier_weight" in given:
        raise ClientError(
            "apd_mixture_weight and apd_verifier_weight: expected one of them, for the first is 1 minus the "
            "second",
            code="invalid_value",
        )
