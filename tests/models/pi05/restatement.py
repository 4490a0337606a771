"""Pi0.5 in plain PyTorch, from the tensors of a lerobot file: no module, no cache, all again in each step.

Written after openpi's `pi0_pytorch.py` and `gemma_pytorch.py` and lerobot's `modeling_pi05.py`.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import conv2d, gelu, layer_norm, linear, silu

Tensors = Mapping[str, torch.Tensor]
HEADS = 4
HEAD_DIM = 16
LAYERS = 2
EPS = 1e-6
VLM = "paligemma_with_expert.paligemma."
TOWER = f"{VLM}model.vision_tower.vision_model."
PREFIX = f"{VLM}model.language_model."
EXPERT = "paligemma_with_expert.gemma_expert.model."


@torch.inference_mode()
def sample_actions(
    tensors: Tensors, pixels: torch.Tensor, ids: Sequence[int], noise: torch.Tensor, steps: int
) -> torch.Tensor:
    """Actions (horizon, dims) of images (n, 3, H, W), the ids of a prompt, and noise (horizon, dims)."""
    table = tensors[f"{VLM}lm_head.weight"]
    text = table[list(ids)] * math.sqrt(table.shape[1])
    prefix = torch.cat([*(_image(tensors, one) for one in pixels), text])
    actions, step = noise, -1.0 / steps
    for number in range(steps):
        velocity = _velocity(tensors, prefix, actions, torch.tensor(1.0 + number * step))
        actions = actions + step * velocity
    return actions


def condition(tensors: Tensors, time: torch.Tensor) -> torch.Tensor:
    """The condition of the adaptive norms at a time of the flow, (hidden,)."""
    width = tensors["time_mlp_in.weight"].shape[0]
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64)
    period = 4e-3 * (4.0 / 4e-3) ** fraction
    angle = time * (1.0 / period) * 2 * math.pi
    waves = torch.cat([angle.sin(), angle.cos()]).float()
    return silu(_linear(tensors, "time_mlp_out", silu(_linear(tensors, "time_mlp_in", waves))))


def _velocity(
    tensors: Tensors, prefix: torch.Tensor, actions: torch.Tensor, time: torch.Tensor
) -> torch.Tensor:
    """Both networks over the whole sequence: the prefix sees itself, the actions see everything."""
    states = [prefix, _linear(tensors, "action_in_proj", actions)]
    cond, count = condition(tensors, time), len(prefix)
    visible = torch.ones(count + len(actions), count + len(actions), dtype=torch.bool)
    visible[:count, count:] = False
    for layer in range(LAYERS):
        names = [f"{PREFIX}layers.{layer}.", f"{EXPERT}layers.{layer}."]
        normed = [
            (_norm(tensors, f"{names[0]}input_layernorm", states[0]), torch.ones(1)),
            _adaptive(tensors, f"{names[1]}input_layernorm", states[1], cond),
        ]
        joined = _attend(tensors, names, [one for one, _ in normed], visible)
        attended = joined[:count], joined[count:]
        for index, name in enumerate(names):
            out = _linear(tensors, f"{name}self_attn.o_proj", attended[index])
            states[index] = states[index] + out * normed[index][1]
        name = "post_attention_layernorm"
        again = _norm(tensors, names[0] + name, states[0])
        states[0] = states[0] + _mlp(tensors, names[0], again)
        changed, gate = _adaptive(tensors, names[1] + name, states[1], cond)
        states[1] = states[1] + _mlp(tensors, names[1], changed) * gate
    last, _ = _adaptive(tensors, f"{EXPERT}norm", states[1], cond)
    return _linear(tensors, "action_out_proj", last)


def _attend(
    tensors: Tensors, names: Sequence[str], normed: Sequence[torch.Tensor], visible: torch.Tensor
) -> torch.Tensor:
    def project(kind: str, heads: int) -> torch.Tensor:
        both = [
            _linear(tensors, f"{name}self_attn.{kind}_proj", one)
            for name, one in zip(names, normed, strict=True)
        ]
        return torch.cat(both).view(-1, heads, HEAD_DIM).transpose(0, 1)

    queries, keys, values = project("q", HEADS), project("k", 1), project("v", 1)
    queries, keys = _rotate(queries), _rotate(keys)
    scores = (queries @ keys.transpose(1, 2)) / math.sqrt(HEAD_DIM)
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return (weights @ values).transpose(0, 1).flatten(1)


def _rotate(vectors: torch.Tensor) -> torch.Tensor:
    half = HEAD_DIM // 2
    rates = 10_000.0 ** -(torch.arange(half).double() / half)
    angles = (torch.arange(vectors.shape[1]).double()[:, None] * rates).float()
    first, second = vectors[..., :half], vectors[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _unit(states: torch.Tensor) -> torch.Tensor:
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + EPS)


def _norm(tensors: Tensors, name: str, states: torch.Tensor) -> torch.Tensor:
    return _unit(states) * (1.0 + tensors[f"{name}.weight"])


def _adaptive(
    tensors: Tensors, name: str, states: torch.Tensor, cond: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    scale, shift, gate = _linear(tensors, f"{name}.dense", cond).chunk(3)
    return _unit(states) * (1 + scale) + shift, gate


def _mlp(tensors: Tensors, layer: str, states: torch.Tensor) -> torch.Tensor:
    gated = gelu(_linear(tensors, f"{layer}mlp.gate_proj", states), approximate="tanh")
    return _linear(tensors, f"{layer}mlp.down_proj", gated * _linear(tensors, f"{layer}mlp.up_proj", states))


def _image(tensors: Tensors, pixels: torch.Tensor) -> torch.Tensor:
    """SigLIP and the projector: the rows of one image."""
    name = f"{TOWER}embeddings."
    patches = conv2d(
        pixels[None],
        tensors[f"{name}patch_embedding.weight"],
        tensors[f"{name}patch_embedding.bias"],
        stride=14,
    )
    states = patches[0].flatten(1).T + tensors[f"{name}position_embedding.weight"]
    for layer in range(LAYERS):
        place = f"{TOWER}encoder.layers.{layer}."
        states = states + _siglip_attention(
            tensors, place, _layer_norm(tensors, f"{place}layer_norm1", states)
        )
        normed = _layer_norm(tensors, f"{place}layer_norm2", states)
        wide = gelu(_linear(tensors, f"{place}mlp.fc1", normed), approximate="tanh")
        states = states + _linear(tensors, f"{place}mlp.fc2", wide)
    states = _layer_norm(tensors, f"{TOWER}post_layernorm", states)
    return _linear(tensors, f"{VLM}model.multi_modal_projector.linear", states)


def _siglip_attention(tensors: Tensors, layer: str, states: torch.Tensor) -> torch.Tensor:
    queries, keys, values = (
        _linear(tensors, f"{layer}self_attn.{kind}_proj", states).view(len(states), HEADS, -1).transpose(0, 1)
        for kind in "qkv"
    )
    weights = (queries @ keys.transpose(1, 2) / math.sqrt(queries.shape[-1])).softmax(-1)
    return _linear(tensors, f"{layer}self_attn.out_proj", (weights @ values).transpose(0, 1).flatten(1))


def _layer_norm(tensors: Tensors, name: str, states: torch.Tensor) -> torch.Tensor:
    weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    return layer_norm(states, states.shape[-1:], weight, bias, EPS)


def _linear(tensors: Tensors, name: str, states: torch.Tensor) -> torch.Tensor:
    return linear(states, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
