"""Record what the published code of BAGEL computes on the tiny checkpoint, to `published.npz`.

    git clone https://github.com/ByteDance-Seed/Bagel /tmp/bagel
    python -m tests.models.bagel.record_published /tmp/bagel

It needs `einops`, and runs the code on a CPU in float32: flash attention is replaced by torch's attention,
torchvision's transforms by Pillow's, and bfloat16 by float32. The code was read at the commit `056b5fd5`.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, modeling_rope_utils
from transformers.utils import import_utils

from tests.models.bagel.cases import CASES, PUBLISHED, SEED, Case, picture
from tests.tiny import bagel as tiny


def main() -> None:
    """Run all cases, and write their results."""
    clone = Path(sys.argv[1])
    _stub_modules()
    sys.path.insert(0, str(clone))
    published = _Published(tiny.bagel_checkpoint())
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name, case in CASES.items():
        found |= {f"{name}.{what}": value for what, value in published.run(case).items()}
        print(name, {what: value.shape for what, value in found.items() if what.startswith(f"{name}.")})
    np.savez_compressed(PUBLISHED, allow_pickle=False, **found)
    print(PUBLISHED, PUBLISHED.stat().st_size, "bytes")


class _Published:
    """The published model over a checkpoint folder, loaded as `app.py` does."""

    def __init__(self, folder: Path) -> None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        known = dict(tokenizer.get_vocab())
        tokenizer, ids, _ = import_module("data.data_utils").add_special_tokens(tokenizer)
        assert tokenizer.get_vocab() == known, "the tiny tokenizer has all tokens"
        self._spoken = list[list[int]]()
        spell = tokenizer.decode

        def decode(token_ids: torch.Tensor) -> str:
            self._spoken.append(token_ids.tolist())
            return str(spell(token_ids))

        tokenizer.decode = decode
        self._latents = list[torch.Tensor]()
        model, autoencoder = _model(folder), _autoencoder(folder)
        draw = model.generate_image

        def generate_image(**kwargs: Any) -> Any:
            latents = draw(**kwargs)
            self._latents.append(latents[0])
            return latents

        model.generate_image = generate_image
        sized = import_module("data.transforms").ImageTransform
        self._inferencer = import_module("inferencer").InterleaveInferencer(
            model, autoencoder, tokenizer, sized(1024, 512, 16), sized(980, 224, 14), ids
        )

    def run(self, case: Case) -> Mapping[str, np.ndarray[Any, Any]]:
        """The tokens, the latents and the pixels of a case."""
        self._spoken.clear()
        self._latents.clear()
        inputs = [Image.fromarray(picture()) if one is None else one for one in case.inputs]
        torch.manual_seed(SEED)
        outputs = self._inferencer.interleave_inference(inputs, **case.options)
        found: dict[str, np.ndarray[Any, Any]] = {}
        if self._spoken:
            found["token_ids"] = np.array(self._spoken[0], np.int32)
        if self._latents:
            every = case.every
            found["latents"] = self._latents[0][::every].float().numpy()
            found["pixels"] = np.asarray(outputs[-1])[::every, ::every]
        return found


def _model(folder: Path) -> Any:
    language: Any = import_module("modeling.bagel.qwen2_navit")
    vision: Any = import_module("modeling.bagel.siglip_navit")
    whole: Any = import_module("modeling.bagel")
    language.torch = vision.torch = _Float32Torch()
    llm = language.Qwen2Config.from_json_file(folder / "llm_config.json")
    llm.qk_norm, llm.tie_word_embeddings, llm.layer_module = True, False, "Qwen2MoTDecoderLayer"
    llm.pad_token_id, llm.rope_theta = None, tiny.TINY.rope_theta
    vit = vision.SiglipVisionConfig.from_json_file(folder / "vit_config.json")
    vit.rope, vit.num_hidden_layers = False, vit.num_hidden_layers - 1
    config = whole.BagelConfig(
        llm_config=llm,
        vit_config=vit,
        vae_config=SimpleNamespace(downsample=8, z_channels=tiny.VAE_CHANNELS),
        vit_max_num_patch_per_side=70,
        latent_patch_size=2,
        max_latent_size=64,
    )
    model = whole.Bagel(language.Qwen2ForCausalLM(llm), vision.SiglipVisionModel(vit), config)
    model.vit_model.vision_model.embeddings.convert_conv2d_to_linear(vit)
    model.load_state_dict(load_file(folder / "ema.safetensors"), strict=True)
    return model.eval()


def _autoencoder(folder: Path) -> Any:
    published: Any = import_module("modeling.autoencoder")
    sizes = published.AutoEncoderParams(
        resolution=256,
        in_channels=3,
        downsample=8,
        ch=tiny.TINY.vae_widths[0],
        out_ch=3,
        ch_mult=[1] * len(tiny.TINY.vae_widths),
        num_res_blocks=tiny.VAE_BLOCKS,
        z_channels=tiny.VAE_CHANNELS,
        scale_factor=0.3611,
        shift_factor=0.1159,
    )
    model = published.AutoEncoder(sizes)
    model.load_state_dict(load_file(folder / "ae.safetensors"), strict=True)
    return model.eval()


# ---- what the code needs, and is not there on a CPU ------------------------------------------------


class _Float32Torch:
    """Torch, whose bfloat16 is float32."""

    bfloat16: Final = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
) -> torch.Tensor:
    """Attention within packed sequences; a causal one is aligned at its end."""
    found = []
    q_bounds, k_bounds = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for one in range(len(q_bounds) - 1):
        queries = q[q_bounds[one] : q_bounds[one + 1]].transpose(0, 1)
        keys, values = (x[k_bounds[one] : k_bounds[one + 1]].transpose(0, 1) for x in (k, v))
        mask = torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool)
        if causal:
            mask = mask.tril(keys.shape[1] - queries.shape[1])
        seen = functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], mask, enable_gqa=True
        )
        found.append(seen[0].transpose(0, 1))
    return torch.cat(found)


def _stub_modules() -> None:
    # Transformers looks for flash attention once, and must not find ours.
    assert not import_utils.is_flash_attn_2_available()
    assert not import_utils.is_flash_attn_4_available()

    def module(name: str, **members: Any) -> ModuleType:
        made = sys.modules[name] = ModuleType(name)
        made.__dict__.update(members)
        return made

    module("flash_attn", flash_attn_varlen_func=_attention)
    module("cv2")
    modes = SimpleNamespace(BICUBIC=Image.Resampling.BICUBIC)
    functions = module("torchvision.transforms.functional", resize=_resize)
    transforms = module(
        "torchvision.transforms",
        ToTensor=lambda: lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255,
        Normalize=lambda mean, std, inplace: lambda x: (x - torch.tensor(mean)[:, None, None]) / std[0],
        InterpolationMode=modes,
        functional=functions,
    )
    module("torchvision", transforms=transforms)
    modeling_rope_utils.ROPE_INIT_FUNCTIONS["default"] = _plain_angles


def _resize(image: Image.Image, size: Sequence[int], mode: Any, *, antialias: bool) -> Image.Image:
    return image.resize((size[1], size[0]), mode)


def _plain_angles(config: Any, device: Any = None, **_: Any) -> tuple[torch.Tensor, float]:
    """Rotary frequencies without scaling; transformers keeps them elsewhere since its version 5."""
    width = config.hidden_size // config.num_attention_heads
    powers = torch.arange(0, width, 2, dtype=torch.float32) / width
    return 1 / config.rope_theta**powers, 1.0


if __name__ == "__main__":
    main()
