"""The packing of decoder layers: from transformers' modules to the structures that the kernels read."""

from ctypes import byref
from dataclasses import asdict
from functools import partial
from typing import Any, Final

import torch

from models.checkpoints.files import UnsupportedArchitectureError
from models.transformers_lm.expert_layers import (
    PARTS,
    ExpertMatrix,
    Part,
    bias_of,
    experts_in,
    has_biases,
    mlp_in,
    router_in,
)
from workers.cpu_kernels import library
from workers.cpu_kernels.library import Library, Matrix
from workers.cpu_kernels.packing import MatrixPacker, kind_of
from workers.kv_engine.kernel_models import TextModel
from workers.kv_engine.quantisation.forms import Forms, Weight
from workers.kv_engine.quantisation.matrices import experts_of, gate_and_up, projections

_ROWS_OF_CHOICE: Final = 16
_LEAST_SUM: Final = 1e-20
"""Added by transformers to the sum of sigmoids that weights are divided by."""
_TOLERANCE_OF_CHOICE: Final = 0.01
"""Of the weight of an expert, whose rounding to bfloat16 is below."""


def inner_width_of(model: TextModel) -> int:
    """Return the largest width of an inner state of an MLP or an expert."""
    mlps = [mlp for layer in model.body.layers if (mlp := mlp_in(layer)) is not None]
    widths: list[int] = [mlp.down_proj.in_features for mlp in mlps]
    widths += [ExpertMatrix(experts, 0, "down").weight.shape[1] for experts in experts_of(model)]
    return max(widths)


class LayerPacker:
    """Packs layers one by one, and frees their weights in transformers' model.

    Args:
        model: has the layers. Made before anything changes how many experts its routers choose.
        forms: the matrices as they are packed.

    Attributes:
        angles: the names of the model's sets of angles, in the order of `library.Layer.angles`.
    """

    def __init__(self, kernels: Library, packer: MatrixPacker, model: TextModel, forms: Forms) -> None:
        self._kernels: Final = kernels
        assert model.kind is not None, "`kernel_models.unknown_in` was asked before"
        self._packer: Final = packer
        self._kind: Final = model.kind
        self._forms: Final = forms
        named = {name for layer in model.body.layers if (name := self._angles(layer)) is not None}
        self.angles: Final = sorted(named) or [""]  # a step has some even if no layer uses them
        routers = [found for layer in model.body.layers if (found := router_in(layer)) is not None]
        self._chosen: Final = {router: router.top_k for router in routers}

    def packed(self, layer: Any) -> library.Layer:
        """Return a decoder layer, whose memory the packer of matrices keeps.

        Raises:
            UnsupportedArchitectureError: its router does not choose as the kernels do.
        """
        own, form = layer.self_attn, self._forms.of
        stack, floats = self._packer.stack, self._packer.floats
        linears = projections(own)
        biases = [linear.bias for linear in linears]
        *others, last = (form(linear) for linear in linears)
        alone = bool(others) and len({*map(kind_of, others)}) == 1 and kind_of(last) != kind_of(others[0])
        angles = self._angles(layer)
        packed = library.Layer(
            qkv=stack(others if alone else [*others, last]),
            v=stack([last]) if alone else Matrix(),  # as in Q4_K_M
            o=stack([form(own.o_proj)]),
            norms=library.Norms(
                **{name: self.norm(getattr(layer, of)) for name, of in asdict(self._kind.norms).items() if of}
            ),
            q_norm=self.norm(own.q_norm) if hasattr(own, "q_norm") else None,
            k_norm=self.norm(own.k_norm) if hasattr(own, "k_norm") else None,
            sinks=floats(own.sinks) if getattr(own, "sinks", None) is not None else None,
            qkv_bias=floats(torch.cat(biases)) if biases[0] is not None else None,
            o_bias=floats(own.o_proj.bias) if own.o_proj.bias is not None else None,
            window=self._kind.window(own) or 0,
            angles=self.angles.index(angles) if angles is not None else -1,
        )
        if (mlp := mlp_in(layer)) is not None:
            weights = [form(linear) for linear in gate_and_up(mlp)]
            gate, up = weights if len(weights) == 2 else _halves(weights[0])
            packed.gate_up = self._packer.interleave(gate, up)
            packed.down = stack([form(mlp.down_proj)])
        if experts_in(layer) is not None:
            packed.experts = self._experts(layer)
        for parameter in layer.parameters():
            parameter.data = parameter.data.new_empty(0)
        return packed

    def norm(self, module: Any) -> int:
        """Return the address of the weights of a norm, as they are multiplied."""
        return self._packer.floats(module.weight.detach().float() + self._kind.norm_offset)

    def _angles(self, layer: Any) -> str | None:
        return self._kind.angles(layer.self_attn)

    def _experts(self, layer: Any) -> library.Experts:
        """Pack the experts of a layer, and their router, whose weights stay floats."""
        router, experts = router_in(layer), experts_in(layer)
        assert router is not None
        assert experts is not None
        choice = self._choice(router)
        self._check_choice(router, choice)

        def all_of(*parts: Part) -> Matrix:
            return self._packer.of_experts(
                [
                    [self._forms.of(ExpertMatrix(experts, number, part)) for part in parts]
                    for number in range(experts.num_experts)
                ]
            )

        gate, up, down = PARTS
        opener = getattr(layer.mlp, "shared_expert_gate", None)
        rows = [router.weight, *([opener.weight] if opener is not None else [])]
        rounded = router.weight.to(self._packer.dtype).to(router.weight.dtype)
        rest = 0 if router.weight.equal(rounded) else sum(map(len, rows))
        packed = library.Experts(
            router=self._packer.stack([*rows, router.weight - rounded] if rest else rows),
            rest=rest,
            gate_up=all_of(gate, up),
            down=all_of(down),
            choice=choice,
            gates_mlp=opener is not None,
        )
        if has_biases(experts):  # gpt-oss, which also has its own activation
            assert not rest, "biases are those of the router's own rows"
            bias = partial(bias_of, experts)
            packed.router_bias = self._packer.biases(router.bias[None])
            packed.gate_up_bias = self._packer.biases(bias("gate"), bias("up"))
            packed.down_bias = self._packer.biases(bias("down"))
            packed.limit, packed.slope = experts.limit, experts.alpha
        return packed

    def _choice(self, router: Any) -> library.Choice:
        """Return how a router chooses: by transformers' names of the properties of routers."""
        statics = getattr(router, "moe_statics", router)
        bias = getattr(statics, "e_score_correction_bias", None)
        # Routers of DeepSeek-V3's kind alone multiply weights, and take sigmoids; `_check_choice` compares.
        is_sigmoid = hasattr(router, "routed_scaling_factor")
        return library.Choice(
            count=router.num_experts,
            chosen=self._chosen[router],
            groups=getattr(router, "num_group", 1),
            open_groups=getattr(router, "topk_group", 1),
            is_sigmoid=is_sigmoid,
            normalises=bool(getattr(router, "norm_topk_prob", True)),
            least=getattr(router, "norm_min", _LEAST_SUM if is_sigmoid else 0.0),
            factor=getattr(router, "routed_scaling_factor", 1.0),
            bias=self._packer.floats(bias.flatten()) if bias is not None else None,
        )

    def _check_choice(self, router: Any, choice: library.Choice) -> None:
        """Compare the weights of chosen experts with the router's: the check of logits lets all be chosen.

        Raises:
            UnsupportedArchitectureError: they differ.
        """
        width = router.weight.shape[1]
        states = torch.randn(_ROWS_OF_CHOICE, width, generator=torch.Generator().manual_seed(0))
        own, router.top_k = router.top_k, self._chosen[router]
        scores, expected, _ = router(states.to(router.weight.dtype))
        router.top_k = own
        scores = scores.float().contiguous()
        found = torch.empty(expected.shape)
        experts = torch.empty(expected.shape, dtype=torch.int32)
        self._kernels.choose(
            *(scores.data_ptr(), len(scores), byref(choice), experts.data_ptr(), found.data_ptr())
        )
        expected, found = (one.float().sort(descending=True).values for one in (expected, found))
        # The weights, because of equal scores either may be chosen.
        error = float((found - expected).abs().max())
        if error > _TOLERANCE_OF_CHOICE:  # weights that are no numbers are found by their logits
            raise UnsupportedArchitectureError(
                f"{type(router).__name__} weighs experts otherwise than the kernels do, by {error:.2g}; "
                "set model_kwargs.kernels to torch"
            )


def _halves(weight: Weight) -> tuple[Weight, Weight]:
    """The first half of a matrix's outputs, and the second."""
    half = weight.shape[0] // 2
    if isinstance(weight, torch.Tensor):
        return weight[:half], weight[half:]
    return weight.outputs(0, half), weight.outputs(half, 2 * half)
