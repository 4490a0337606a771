"""The KV node of diffusion language models: a decoder of transformers whose tokens may see later ones."""

from collections.abc import Mapping
from typing import Final

from models.programs import TokenProgram
from models.transformers_lm.node import DecoderLM


class DiffusionLM(DecoderLM):
    """A node of the KV engine with token programs, and further models for their passes.

    Attributes:
        token_programs: by name.
        towers: further models, by name: the verifier of APD.
    """

    masks: frozenset[str] = frozenset({"causal", "full"})

    def __init__(
        self,
        decoder: DecoderLM,
        programs: Mapping[str, TokenProgram],
        towers: Mapping[str, DecoderLM] | None = None,
    ) -> None:
        super().__init__(
            decoder.model,
            name=decoder.name,
            layout=decoder.layout,
            max_positions=decoder.max_positions,
            weights_digest=decoder.weights_digest,
        )
        self.token_programs: Final = programs
        self.towers: Final = {} if towers is None else towers
