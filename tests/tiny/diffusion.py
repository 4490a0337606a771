"""Tiny pipelines of diffusers, one of each class that is served in parts, and one that is served whole.

Random weights: norms and biases are moved away from their initial values, so that prompt, seed, size and
picture all change the result.
"""

import atexit
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

_VOCABULARY: Final = 320
_TEXT: Final = {"vocab_size": _VOCABULARY, "hidden_size": 32, "intermediate_size": 64}
_HEADS: Final = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_VAE: Final = {
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "block_out_channels": [16, 16],
    "norm_num_groups": 8,
}
_PLAIN_VAE: Final = {**_VAE, "use_quant_conv": False, "use_post_quant_conv": False}
_SPECIAL: Final = (
    "<pad>", "</s>", "<s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>",
    "<|vision_end|>", "<|video_pad|>",
)  # fmt: skip
_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MOVED: Final = 0.05
_CLIP_LENGTH: Final = 77


@cache
def tiny_pipeline(name: str) -> Path:
    """The folder of the checkpoint of this name (`BUILDERS`); made once in a process, removed at its end."""
    import torch  # noqa: PLC0415 - a second, for tests that build it
    from diffusers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    temporary = TemporaryDirectory(prefix=f"pipeline-{name}-")
    atexit.register(temporary.cleanup)
    folder = Path(temporary.name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipeline = BUILDERS[name]()
        for module in pipeline.components.values():
            if isinstance(module, torch.nn.Module):
                _move(module)
    pipeline.save_pretrained(folder)
    return folder


def _move(module: Any) -> None:
    import torch  # noqa: PLC0415

    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1 or not parameter.abs().max():
                parameter.add_(_MOVED * torch.randn_like(parameter))


def _library() -> Any:
    """diffusers, untyped: a second, for tests that build a checkpoint."""
    import diffusers  # noqa: PLC0415

    return diffusers


def _tokenizer(length: int = 512) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["a red cat sits on the mat"] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<unk>",
        model_max_length=length,
        chat_template=_TEMPLATE,
    )


def _clip(*, projected: bool = False, layers: int = 2) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection  # noqa: PLC0415

    kind = CLIPTextModelWithProjection if projected else CLIPTextModel
    return kind(
        CLIPTextConfig(
            vocab_size=_VOCABULARY, hidden_size=32, intermediate_size=37, num_hidden_layers=layers,
            num_attention_heads=4, projection_dim=32, bos_token_id=2, eos_token_id=1, pad_token_id=0,
        )
    )  # fmt: skip


def _t5(kind: str = "T5") -> Any:
    import transformers  # noqa: PLC0415

    config = getattr(transformers, f"{kind}Config")
    sizes = {"vocab_size": _VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return getattr(transformers, f"{kind}EncoderModel")(config(**sizes))


def _z_image() -> Any:
    d = _library()
    from transformers import Qwen3Config, Qwen3Model  # noqa: PLC0415

    transformer = d.ZImageTransformer2DModel(
        all_patch_size=(2,), all_f_patch_size=(1,), in_channels=16, dim=32, n_layers=2, n_refiner_layers=1,
        n_heads=2, n_kv_heads=2, norm_eps=1e-5, qk_norm=True, cap_feat_dim=32, rope_theta=256.0,
        t_scale=1000.0, axes_dims=[8, 4, 4], axes_lens=[256, 32, 32],
    )  # fmt: skip
    vae = d.AutoencoderKL(**_PLAIN_VAE, latent_channels=16, shift_factor=0.0, scaling_factor=1.0)
    text = Qwen3Model(Qwen3Config(**_TEXT, num_hidden_layers=3, **_HEADS))
    return d.ZImagePipeline(
        d.FlowMatchEulerDiscreteScheduler(shift=3.0), vae, text, _tokenizer(), transformer
    )


def _flux() -> Any:
    d = _library()

    transformer = d.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
        guidance_embeds=True,
    )  # fmt: skip
    return d.FluxPipeline(
        scheduler=d.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=d.AutoencoderKL(**_PLAIN_VAE, latent_channels=4, shift_factor=0.06, scaling_factor=1.5),
        text_encoder=_clip(),
        tokenizer=_tokenizer(_CLIP_LENGTH),
        text_encoder_2=_t5(),
        tokenizer_2=_tokenizer(),
        transformer=transformer,
    )


def _flux2_klein() -> Any:
    d = _library()
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

    transformer = d.Flux2Transformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=96, timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4), mlp_ratio=2.0,
    )  # fmt: skip
    return d.Flux2KleinPipeline(
        scheduler=d.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=d.AutoencoderKLFlux2(**_VAE, latent_channels=4),
        text_encoder=Qwen3ForCausalLM(Qwen3Config(**_TEXT, num_hidden_layers=28, **_HEADS)),
        tokenizer=_tokenizer(),
        transformer=transformer,
    )


def _qwen_image() -> Any:
    d = _library()
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration  # noqa: PLC0415

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    text = {**_TEXT, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
    encoder = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={**text, "rope_parameters": rope}, vision_config=vision, image_token_id=7,
            video_token_id=8, vision_start_token_id=6, vision_end_token_id=8,
        )
    )  # fmt: skip
    transformer = d.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, guidance_embeds=False, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    vae = d.AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 2, 4], num_res_blocks=1, temperal_downsample=[False, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    return d.QwenImagePipeline(
        scheduler=d.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=encoder,
        tokenizer=_tokenizer(),
        transformer=transformer,
    )


def _sd3() -> Any:
    d = _library()

    transformer = d.SD3Transformer2DModel(
        sample_size=32, patch_size=1, in_channels=4, num_layers=1, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=64,
        out_channels=4,
    )  # fmt: skip
    return d.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=d.FlowMatchEulerDiscreteScheduler(),
        vae=d.AutoencoderKL(**_PLAIN_VAE, latent_channels=4, shift_factor=0.06, scaling_factor=1.5),
        text_encoder=_clip(projected=True, layers=5),
        tokenizer=_tokenizer(_CLIP_LENGTH),
        text_encoder_2=_clip(projected=True, layers=5),
        tokenizer_2=_tokenizer(_CLIP_LENGTH),
        text_encoder_3=_t5(),
        tokenizer_3=_tokenizer(),
    )


def _unet(width: int, **more: Any) -> Any:
    d = _library()

    return d.UNet2DConditionModel(
        block_out_channels=(16, 32), layers_per_block=1, sample_size=32, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=width, norm_num_groups=8,
        attention_head_dim=4, **more,
    )  # fmt: skip


def _sdxl() -> Any:
    d = _library()

    unet = _unet(
        64, addition_embed_type="text_time", addition_time_embed_dim=8, transformer_layers_per_block=1,
        projection_class_embeddings_input_dim=80, use_linear_projection=True,
    )  # fmt: skip
    return d.StableDiffusionXLPipeline(
        vae=d.AutoencoderKL(**_VAE, latent_channels=4),
        text_encoder=_clip(),
        text_encoder_2=_clip(projected=True),
        tokenizer=_tokenizer(_CLIP_LENGTH),
        tokenizer_2=_tokenizer(_CLIP_LENGTH),
        unet=unet,
        scheduler=d.EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", timestep_spacing="leading"
        ),
    )


def _stable_diffusion(*, checked: bool = False) -> Any:
    d = _library()

    scheduler = d.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
        set_alpha_to_one=False, steps_offset=1,
    )  # fmt: skip
    return d.StableDiffusionPipeline(
        vae=d.AutoencoderKL(**_VAE, latent_channels=4),
        text_encoder=_clip(),
        tokenizer=_tokenizer(_CLIP_LENGTH),
        unet=_unet(32),
        scheduler=scheduler,
        safety_checker=_checker() if checked else None,
        feature_extractor=_extractor() if checked else None,
        requires_safety_checker=checked,
    )


def _checker() -> Any:
    from diffusers.pipelines.stable_diffusion.safety_checker import (  # noqa: PLC0415
        StableDiffusionSafetyChecker,
    )
    from transformers import CLIPConfig  # noqa: PLC0415

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "image_size": 30, "patch_size": 15}
    text = {**sizes, "vocab_size": _VOCABULARY, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    return StableDiffusionSafetyChecker(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def _image_encoder() -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel  # noqa: PLC0415

    return CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=30,
            patch_size=15,
        )
    )  # fmt: skip


def _extractor() -> Any:
    from transformers import CLIPImageProcessor  # noqa: PLC0415

    return CLIPImageProcessor(size={"shortest_edge": 30}, crop_size={"height": 30, "width": 30})


def _wan_transformer(channels: int, **more: Any) -> Any:
    d = _library()

    return d.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, out_channels=channels,
        text_dim=32, freq_dim=32, ffn_dim=32, num_layers=2, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=32, **{"in_channels": channels, **more},
    )  # fmt: skip


def _wan_vae(channels: int) -> Any:
    d = _library()

    sizes = {
        "base_dim": 3, "z_dim": channels, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
    }  # fmt: skip
    if channels == _WAN22_CHANNELS:
        sizes |= {
            "decoder_base_dim": 3, "is_residual": True, "in_channels": 12, "out_channels": 12,
            "patch_size": 2, "scale_factor_spatial": 16, "scale_factor_temporal": 4,
            "latents_mean": [0.0] * channels, "latents_std": [1.0] * channels,
        }  # fmt: skip
    return d.AutoencoderKLWan(**sizes)


_WAN21_CHANNELS: Final = 16
_WAN22_CHANNELS: Final = 48


def _unipc(shift: float) -> Any:
    d = _library()

    return d.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )


def _wan(channels: int = _WAN21_CHANNELS, *, experts: int = 1, image: bool = False) -> Any:
    d = _library()

    parts: dict[str, Any] = {"transformer": _wan_transformer(channels)}
    if experts > 1:
        parts |= {"transformer_2": _wan_transformer(channels), "boundary_ratio": 0.875}
    if image and channels == _WAN21_CHANNELS:
        transformer = _wan_transformer(
            channels, in_channels=2 * channels + 4, image_dim=16, added_kv_proj_dim=24
        )
        parts |= {
            "transformer": transformer,
            "image_encoder": _image_encoder(),
            "image_processor": _extractor(),
        }
    elif image:
        parts |= {"image_encoder": None, "image_processor": None}
    return (d.WanImageToVideoPipeline if image else d.WanPipeline)(
        tokenizer=_tokenizer(),
        text_encoder=_t5("UMT5"),
        vae=_wan_vae(channels),
        scheduler=_unipc(3.0 if channels == _WAN21_CHANNELS else 5.0),
        expand_timesteps=channels == _WAN22_CHANNELS,
        **parts,
    )


def _ltx(*, image: bool = False) -> Any:
    d = _library()

    transformer = d.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, patch_size=1, patch_size_t=1, num_attention_heads=4,
        attention_head_dim=8, cross_attention_dim=32, num_layers=1, caption_channels=32,
    )  # fmt: skip
    vae = d.AutoencoderKLLTXVideo(
        in_channels=3, out_channels=3, latent_channels=8, block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8), layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1), spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False), decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4, upsample_factor=(1,) * 4, timestep_conditioning=False, patch_size=1,
        patch_size_t=1, encoder_causal=True, decoder_causal=False,
    )  # fmt: skip
    return (d.LTXImageToVideoPipeline if image else d.LTXPipeline)(
        transformer=transformer,
        vae=vae,
        scheduler=d.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        text_encoder=_t5(),
        tokenizer=_tokenizer(),
    )


def _cosmos3(*, sound: bool = False) -> Any:
    d = _library()

    hears = {"sound_gen": True, "sound_dim": 8} if sound else {}
    transformer = d.Cosmos3OmniTransformer(
        head_dim=16, hidden_size=32, intermediate_size=64, latent_channel=48, latent_patch_size=2,
        num_attention_heads=2, num_hidden_layers=2, num_key_value_heads=1, patch_latent_dim=192,
        rope_scaling={"mrope_section": [4, 2, 2], "mrope_interleaved": True, "rope_type": "default"},
        vocab_size=_VOCABULARY, dtype="float32", **hears,
    )  # fmt: skip
    return d.Cosmos3OmniPipeline(
        transformer=transformer,
        text_tokenizer=_tokenizer(),
        vae=_wan_vae(_WAN22_CHANNELS),
        scheduler=_unipc(5.0),
        sound_tokenizer=_sound_tokenizer() if sound else None,
        enable_safety_checker=False,
    )


def _sound_tokenizer() -> Any:
    return _library().Cosmos3AVAEAudioTokenizer(
        sampling_rate=200, vocoder_input_dim=8, dec_dim=16, dec_c_mults=(1, 2), dec_strides=(2, 4),
        encoder_enabled=False,
    )  # fmt: skip


BUILDERS: Final[dict[str, Callable[[], Any]]] = {
    "z_image": _z_image,
    "qwen_image": _qwen_image,
    "flux": _flux,
    "flux2_klein": _flux2_klein,
    "sd3": _sd3,
    "sdxl": _sdxl,
    "wan21": _wan,
    "wan22_5b": lambda: _wan(_WAN22_CHANNELS),
    "wan22_a14b": lambda: _wan(experts=2),
    "wan21_i2v": lambda: _wan(image=True),
    "wan22_i2v": lambda: _wan(_WAN22_CHANNELS, image=True),
    "ltx": _ltx,
    "ltx_i2v": lambda: _ltx(image=True),
    "cosmos3": _cosmos3,
    "cosmos3_sound": lambda: _cosmos3(sound=True),
    "stable_diffusion": _stable_diffusion,
    "stable_diffusion_checked": lambda: _stable_diffusion(checked=True),
}

_IMAGE: Final = {"height": 32, "width": 32, "num_inference_steps": 3}
_VIDEO: Final = {"num_frames": 9, "max_sequence_length": 16}
CALLS: Final[dict[str, dict[str, Any]]] = {
    "z_image": {**_IMAGE, "guidance_scale": 3.0},
    "qwen_image": {**_IMAGE, "true_cfg_scale": 2.0, "max_sequence_length": 256},
    "flux": {**_IMAGE, "guidance_scale": 3.5, "max_sequence_length": 32},
    "flux2_klein": {**_IMAGE, "guidance_scale": 4.0, "max_sequence_length": 64},
    "sd3": {**_IMAGE, "guidance_scale": 5.0, "max_sequence_length": 16},
    "sdxl": {**_IMAGE, "guidance_scale": 5.0},
    "wan21": {**_IMAGE, **_VIDEO, "guidance_scale": 5.0},
    "wan22_5b": {**_IMAGE, **_VIDEO, "guidance_scale": 5.0},
    "wan22_a14b": {**_IMAGE, **_VIDEO, "guidance_scale": 4.0, "guidance_scale_2": 3.0},
    "wan21_i2v": {**_IMAGE, **_VIDEO, "guidance_scale": 5.0},
    "wan22_i2v": {**_IMAGE, **_VIDEO, "guidance_scale": 5.0},
    "ltx": {**_IMAGE, **_VIDEO, "guidance_scale": 3.0},
    "ltx_i2v": {**_IMAGE, **_VIDEO, "guidance_scale": 3.0},
    "cosmos3": {**_IMAGE, "num_frames": 9, "guidance_scale": 6.0},
    "cosmos3_sound": {**_IMAGE, "num_frames": 9, "guidance_scale": 6.0, "enable_sound": True},
    "stable_diffusion": {**_IMAGE, "guidance_scale": 5.0},
    "stable_diffusion_checked": {**_IMAGE, "guidance_scale": 5.0},
}
"""Arguments of a small call of each, without prompt and generator."""


def pipeline_class(folder: Path) -> str:
    """The class of the pipeline in a folder, as its `model_index.json` says."""
    found: str = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))["_class_name"]
    return found
