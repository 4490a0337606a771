"""The decoder of Higgs Audio's codec: residual codebooks, a projection, and DAC's decoder.

transformers' own class needs torchaudio, which it uses for encoding only. This one has the members that
decode, under their published names.
"""

import re
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoModel, HiggsAudioV2TokenizerConfig, PreTrainedModel

DECODING: Final = re.compile(r"acoustic_decoder\.|fc2\.|quantizer\..*\.(codebook\.embed$|project_out\.)")
"""The begins of the names of the weights that decode."""


class _Codebook(nn.Module):
    embed: torch.Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.register_buffer("embed", torch.zeros(config.codebook_size, config.codebook_dim))


class _Quantizer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.codebook = _Codebook(config)
        self.project_out = nn.Linear(config.codebook_dim, config.hidden_size)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.project_out(self.codebook.embed[codes])
        return found


class _Quantizers(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.quantizers = nn.ModuleList(_Quantizer(config) for _ in range(config.num_quantizers))


class HiggsAudioV2TokenizerModel(PreTrainedModel):  # type: ignore[misc] # transformers has no types
    """The half that decodes.

    Codes beyond the codebooks, which begin and end speech, are those of the largest one, as in transformers'
    processor.
    """

    config_class = HiggsAudioV2TokenizerConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.acoustic_decoder = AutoModel.from_config(config.acoustic_model_config).decoder
        self.acoustic_decoder.tanh = nn.Identity()
        for module in self.acoustic_decoder.modules():
            if isinstance(module, nn.ConvTranspose1d):
                module.output_padding = (module.stride[0] % 2,)
        self.quantizer = _Quantizers(config)
        self.fc2 = nn.Linear(config.hidden_size, config.acoustic_model_config.hidden_size)
        self.post_init()

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes, (1, codebooks, frames), to samples, (1, 1, frames * hop)."""
        known = codes[0].clamp(max=self.config.codebook_size - 1)
        rows = torch.zeros((), device=known.device)
        for quantizer, one in zip(self.quantizer.quantizers, known, strict=True):
            rows = rows + quantizer(one)
        found: torch.Tensor = self.acoustic_decoder(self.fc2(rows).T[None])
        return found
