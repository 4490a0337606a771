"""The token program `apd`: a driver for the options of a request, if the deployment has a verifier."""

from collections.abc import Mapping
from typing import Any

import msgspec

from models.diffusion_text.apd import VERIFIER, ApdDriver, ApdSettings
from models.diffusion_text.apd_options import ApdOptions, check_apd
from models.programs import TokenDriver, TokenProgram, TokenRequest
from shared.errors import ClientError


def apd_program(*, mask_id: int, shifts: bool) -> TokenProgram:
    """Return the token program of a denoiser with a verifier.

    Args:
        mask_id: the denoiser's mask token.
        shifts: its logits of a token are those of the next one.
    """

    def start(node: Any, request: TokenRequest) -> TokenDriver:
        towers = node.towers
        if VERIFIER not in towers:
            raise ClientError(
                "apd: this deployment has no verifier; expected model_kwargs with verifier: FOLDER, the "
                "folder of an autoregressive model with the same tokenizer",
                code="not_supported",
            )
        return ApdDriver(
            request,
            _settings(request.options),
            mask_id=mask_id,
            shifts=shifts,
            vocab_size=min(node.vocab_size, towers[VERIFIER].vocab_size),
            device=node.device,
        )

    return start


def _settings(given: Mapping[str, Any]) -> ApdSettings:
    """The settings that a request asks for; it has options of its family besides those of APD.

    Raises:
        ClientError: the options exclude one another.
    """
    given = {name: value for name, value in given.items() if name in ApdOptions.__struct_fields__}
    options = msgspec.convert(given, ApdOptions)
    check_apd(options, given)
    weight = options.apd_mixture_weight
    return ApdSettings(
        denoiser_weight=1 - options.apd_verifier_weight if weight is None else weight,
        window=options.apd_window,
        lookahead=options.apd_lookahead,
        threshold=options.apd_threshold,
    )
