"""LoRA adapters beside a loaded model: several in one forward, each for its own tokens.

    y[tokens of adapter i] += B_i (A_i x[tokens of adapter i]) * scale_i

A hook on each adapted module adds the products, so any kind of linear module can be adapted, quantised ones
too. The tokens of an adapter are computed together and apart from all others; the rows of the plain model
are not touched.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open

from models.checkpoints.adapters import AdapterError, adapter_digest, read_adapter, tensor_name
from shared.adapters import Adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """The matrices of one module, (r, in) and (out, r), and the factor of their product."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is added for (T, in): (T, out)."""
        return (x.to(self.a.dtype) @ self.a.T @ self.b.T) * self.scale


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterWeights:
    """A loaded adapter: its products by module, and their bytes on the device."""

    adapter: Adapter
    products: Mapping[str, _Product]
    nbytes: int


Groups = Sequence[tuple[AdapterWeights, torch.Tensor]]
"""The adapters of a step, each with the indices of its tokens, (N,) int64."""


class AdaptedModules:
    """The modules of `model` that adapters may change; `observing` finds them. One forward runs at a time."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules: Final = dict(model.named_modules())
        parameter = next(model.parameters())
        self._device, self._dtype = parameter.device, model.dtype
        self._adaptable: set[str] = set()
        self._hooked: set[str] = set()
        self._groups: Groups = ()

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Find the modules that are computed once for each token, from the forwards within; only these adapt.

        Latent attention multiplies by the weights of a module without calling it, and experts get the tokens
        that are routed to them.
        """
        rows = Counter[str]()

        def count(name: str) -> Any:
            return lambda _, inputs, __: rows.update({name: inputs[0].shape[:-1].numel()} if inputs else {})

        linear = [(name, one) for name, one in self._modules.items() if hasattr(one, "in_features")]
        hooks = [module.register_forward_hook(count(name)) for name, module in linear]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        usual = Counter(rows.values()).most_common(1)
        self._adaptable = {name for name, seen in rows.items() if usual and seen == usual[0][0]}

    def load(self, adapter: Adapter) -> AdapterWeights:
        """Read an adapter's weights to the device.

        Raises:
            AdapterError: it is not whole, was made for another model, or is no longer the one that `adapter`
                names.
        """
        folder = Path(adapter.folder)
        files = read_adapter(folder)
        if (found := adapter_digest(folder)) != adapter.digest:
            raise AdapterError(
                f"adapter {adapter.name!r}: the weights {adapter.digest[:12]} are gone: {folder} has "
                f"{found[:12]} now; load it again under its name, and send the request again"
            )
        products = dict[str, _Product]()
        with safe_open(folder / "adapter_model.safetensors", framework="pt") as tensors:
            for module, scale in files.scales.items():
                a, b = (
                    tensors.get_tensor(tensor_name(module, side)).to(self._device, self._dtype)
                    for side in "AB"
                )
                self._check(adapter, module, a, b)
                products[module] = _Product(a=a, b=b, scale=scale)
        for module in products.keys() - self._hooked:
            self._modules[module].register_forward_hook(self._hook(module))
        self._hooked |= products.keys()
        nbytes = sum(one.a.nbytes + one.b.nbytes for one in products.values())
        return AdapterWeights(adapter=adapter, products=products, nbytes=nbytes)

    @contextmanager
    def computing(self, groups: Groups) -> Iterator[None]:
        """Compute the forwards within with these adapters."""
        self._groups = groups
        try:
            yield
        finally:
            self._groups = ()

    def _check(self, adapter: Adapter, name: str, a: torch.Tensor, b: torch.Tensor) -> None:
        module = self._modules.get(name)
        shape = (getattr(module, "in_features", None), getattr(module, "out_features", None))
        if module is None or shape != (a.shape[1], b.shape[0]):
            what = f"has {shape[0]} inputs and {shape[1]} outputs" if module is not None else "does not exist"
            raise AdapterError(
                f"adapter {adapter.name!r} was made for another model: it changes {name} of {a.shape[1]} "
                f"inputs and {b.shape[0]} outputs, which {what} here"
            )
        if name not in self._adaptable:
            raise AdapterError(
                f"adapter {adapter.name!r}: it changes {name}, which is not computed as a layer of each "
                "token here: expected target_modules without it"
            )

    def _hook(self, name: str) -> Any:
        def add(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            if not self._groups:
                return output
            x, y = inputs[0].flatten(0, -2), output.flatten(0, -2)
            for weights, tokens in self._groups:
                if (product := weights.products.get(name)) is not None:
                    added = product.of(x.index_select(0, tokens)).to(y.dtype)
                    y = y.index_copy(0, tokens, y.index_select(0, tokens) + added)
            return y.view_as(output)

        return add
