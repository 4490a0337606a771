"""Tiny LoRA adapters in peft's layout, and their oracle: the model of transformers with merged weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from models.checkpoints.adapters import CONFIG, WEIGHTS, adapter_at
from shared.adapters import Adapter

ALL_LINEAR: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path,
    checkpoint: Path,
    *,
    seed: int,
    rank: int = 4,
    modules: Sequence[str] = ALL_LINEAR,
    size: float = 0.3,
    **fields: Any,
) -> Adapter:
    """Write a random adapter for a checkpoint; large enough that it changes answers.

    `fields` go into its configuration. `rank_pattern` decides the shapes as well.
    """
    random = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name.rpartition(".")[2] not in modules:
            continue
        own = {k: v for k, v in fields.get("rank_pattern", {}).items() if name.endswith(k)}
        r = next(iter(own.values()), rank)
        for side, shape in (("A", (r, module.in_features)), ("B", (module.out_features, r))):
            drawn = torch.randn(*shape, generator=random) * size
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = drawn
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(checkpoint),
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config | fields))
    save_file(tensors, folder / WEIGHTS)
    return adapter_at(folder.name, folder)


def merged(checkpoint: Path, adapter: Adapter | None) -> Any:
    """The model of transformers with W + scale * B A in place of each adapted W; by peft's formula alone."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    if adapter is None:
        return model
    folder = Path(adapter.folder)
    config, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    for name, module in model.named_modules():
        key = f"base_model.model.{name}.lora_A.weight"
        if key not in tensors:
            continue
        a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]
        alphas = [v for k, v in (config.get("alpha_pattern") or {}).items() if name.endswith(k)]
        alpha = alphas[0] if alphas else config["lora_alpha"]
        scale = alpha / (a.shape[0] ** 0.5 if config["use_rslora"] else a.shape[0])
        module.weight.data += scale * (b @ a)
    return model


def generate(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """The greedy answer of a model of transformers."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return [int(token) for token in found[0, len(prompt) :]]
