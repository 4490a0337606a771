"""LLaDA2's forward pass restated in plain torch, from the published description of its layers.

No module of transformers: each matrix is read from the file under its published name.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import silu, softmax

Tensors = dict[str, torch.Tensor]


class NaiveLLaDA2:
    """All tokens of one sequence at once, under a mask."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights: Tensors = load_file(folder / "model.safetensors")

    def logits(self, ids: list[int], visible: torch.Tensor) -> torch.Tensor:
        """(T, vocab); token i sees token j where `visible[i, j]`."""
        x = self.weights["model.word_embeddings.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            x = x + self._attention(self._norm(x, f"{at}.input_layernorm"), f"{at}.attention", visible)
            y = self._norm(x, f"{at}.post_attention_layernorm")
            is_dense = layer < self.config["first_k_dense_replace"]
            x = x + (self._gated(y, f"{at}.mlp") if is_dense else self._experts(y, f"{at}.mlp"))
        logits: torch.Tensor = self._norm(x, "model.norm") @ self.weights["lm_head.weight"].T
        return logits

    def _norm(self, x: torch.Tensor, at: str) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        scaled: torch.Tensor = x * scale * self.weights[f"{at}.weight"]
        return scaled

    def _attention(self, x: torch.Tensor, at: str, visible: torch.Tensor) -> torch.Tensor:
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        size = self.config["head_dim"]
        fused = (x @ self.weights[f"{at}.query_key_value.weight"].T).view(len(x), heads + 2 * groups, size)
        q, k, v = fused[:, :heads], fused[:, heads:-groups], fused[:, -groups:]
        q, k = self._norm(q, f"{at}.query_layernorm"), self._norm(k, f"{at}.key_layernorm")
        q, k = self._turn(q), self._turn(k)
        k, v = (one.repeat_interleave(heads // groups, dim=1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
        weights = softmax(scores.masked_fill(~visible, -torch.inf), -1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ self.weights[f"{at}.dense.weight"].T

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary angles on the first part of a head, whose two halves are the coordinates."""
        width = int(self.config["head_dim"] * self.config["partial_rotary_factor"])
        speeds = self.config["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        angles = (torch.arange(len(x))[:, None] * speeds)[:, None]
        a, b, rest = x[..., : width // 2], x[..., width // 2 : width], x[..., width:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def _gated(self, x: torch.Tensor, at: str) -> torch.Tensor:
        gate, up, down = (self.weights[f"{at}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    def _experts(self, x: torch.Tensor, at: str) -> torch.Tensor:
        """The shared experts, and the best ones of the best groups: chosen with the bias, weighed without."""
        config = self.config
        scores = (x @ self.weights[f"{at}.gate.weight"].T).sigmoid()
        biased = scores + self.weights[f"{at}.gate.expert_bias"]
        rows = []
        for one, score, choice in zip(x, scores, biased, strict=True):
            groups = choice.view(config["n_group"], -1)
            best = groups.topk(2).values.sum(-1).topk(config["topk_group"]).indices
            allowed = torch.full_like(groups, -torch.inf)
            allowed[best] = groups[best]
            chosen = allowed.flatten().topk(config["num_experts_per_tok"]).indices
            shares = score[chosen] / score[chosen].sum() * config["routed_scaling_factor"]
            outputs = [self._gated(one[None], f"{at}.experts.{int(expert)}")[0] for expert in chosen]
            rows.append(sum(share * output for share, output in zip(shares, outputs, strict=True)))
        return self._gated(x, f"{at}.shared_experts") + torch.stack(rows)
