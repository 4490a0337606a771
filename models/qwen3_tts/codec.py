"""The decoder of the 12 Hz tokenizer of Qwen3-TTS: frames of codes to sound.

    codes -> sum of their vectors -> convolution -> transformer -> upsampling -> decoder blocks -> samples

Blocks and transformer are those of Qwen3-Omni's code2wav. What differs: the vectors of codes are those of a
residual quantizer in two parts, the transformer is narrower than what is around it, and each upsampling cuts
what comes after its input, so the decoder is causal and a frame is always the same number of samples.
The names of members are those of the published tensors.
"""

from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig

_FEWEST: Final = 1e-5
"""The least use of a code that its vector is divided by."""


class _Codebook(nn.Module):
    """The vectors of the codes of one group, stored as sums over their uses."""

    def __init__(self, codes: int, width: int) -> None:
        super().__init__()
        self.cluster_usage = nn.Parameter(torch.ones(codes))
        self.embedding_sum = nn.Parameter(torch.zeros(codes, width))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        table = self.embedding_sum / self.cluster_usage.clamp(min=_FEWEST)[:, None]
        return functional.embedding(codes, table)


class _Quantizer(nn.Module):
    """A residual quantizer: (batch, groups, frames) codes to (batch, width, frames)."""

    def __init__(self, groups: int, config: Any) -> None:
        super().__init__()
        width = config.codebook_dim // 2
        books = [nn.ModuleDict({"_codebook": _Codebook(config.codebook_size, width)}) for _ in range(groups)]
        self.vq = nn.ModuleDict({"layers": nn.ModuleList(books)})
        # Only the codec's encoder uses it, but the published files have it.
        self.input_proj = nn.Conv1d(config.codebook_dim, width, 1, bias=False)
        self.output_proj = nn.Conv1d(width, config.codebook_dim, 1, bias=False)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        layers: Any = self.vq["layers"]
        vectors = torch.zeros((), device=codes.device)
        for group, layer in enumerate(layers):
            vectors = vectors + layer["_codebook"](codes[:, group])
        found: torch.Tensor = self.output_proj(vectors.transpose(1, 2))
        return found


class _Transformer(omni.Qwen3OmniMoeCode2WavTransformerModel):  # type: ignore[misc] # transformers has no types
    """Code2wav's transformer between two projections: (batch, frames, latent) to the same."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.input_proj = nn.Linear(config.latent_dim, config.hidden_size)
        self.output_proj = nn.Linear(config.hidden_size, config.latent_dim)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        states = super().forward(inputs_embeds=self.input_proj(latents)).last_hidden_state
        found: torch.Tensor = self.output_proj(states)
        return found


class CodecDecoder(omni.Qwen3OmniMoePreTrainedModel):  # type: ignore[misc] # transformers has no types
    """Codes (batch, groups, frames) to samples (batch, 1, frames x `total_upsample`), from -1 to 1."""

    config: Qwen3OmniMoeCode2WavConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        latent, width = config.latent_dim, config.decoder_dim
        self.total_upsample = 1
        for rate in (*config.upsample_rates, *config.upsampling_ratios):
            self.total_upsample *= rate
        self.quantizer = nn.ModuleDict(
            {"rvq_first": _Quantizer(1, config), "rvq_rest": _Quantizer(config.num_quantizers - 1, config)}
        )
        self.pre_conv = omni.Qwen3OmniMoeCausalConvNet(config.codebook_dim, latent, 3)
        self.pre_transformer = _Transformer(config)
        self.upsample = nn.ModuleList(
            nn.ModuleList(
                [
                    omni.Qwen3OmniMoeCausalTransConvNet(latent, latent, ratio, ratio),
                    omni.Qwen3OmniMoeConvNeXtBlock(latent),
                ]
            )
            for ratio in config.upsampling_ratios
        )
        last = width // 2 ** len(config.upsample_rates)
        self.decoder = nn.ModuleList(
            [
                omni.Qwen3OmniMoeCausalConvNet(latent, width, 7),
                *(
                    omni.Qwen3OmniMoeCode2WavDecoderBlock(config, i)
                    for i in range(len(config.upsample_rates))
                ),
                omni.Qwen3OmniMoeSnakeBeta(last),
                omni.Qwen3OmniMoeCausalConvNet(last, 1, 7),
            ]
        )
        for module in self.modules():
            if isinstance(module, omni.Qwen3OmniMoeCausalTransConvNet):
                module.left_pad = 0  # code2wav cuts on both sides, and so looks ahead
        self.post_init()

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        vectors = self.quantizer["rvq_first"](codes[:, :1]) + self.quantizer["rvq_rest"](codes[:, 1:])
        hidden = self.pre_transformer(self.pre_conv(vectors).transpose(1, 2)).transpose(1, 2)
        stages: Any = self.upsample
        for block in (*(block for blocks in stages for block in blocks), *self.decoder):
            hidden = block(hidden)
        sound: torch.Tensor = hidden.clamp(min=-1, max=1)
        return sound
