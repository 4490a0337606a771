"""The imports of a worker that take long, made before it is known which rank it is.

A template makes them, and then forks workers (docs/adr/0052-roles-are-forked.md). So nothing here may start a
thread or use a GPU: neither works in a forked process.
"""

from importlib import import_module
from typing import Final

from configs.deployment import DeploymentConfig
from models import registry
from models.base import EngineKind

_OF_KV_ENGINES: Final = (
    "workers.kv_engine.engine_group",
    "workers.cpu_kernels.decoder",
    "workers.loading.prefix_warmup",
    "transformers.models.auto.modeling_auto",
    "transformers.generation.utils",
    "transformers.modeling_layers",
    "transformers.processing_utils",
    "sympy",  # torch's own import where a model runs on its meta device
    "torch.fx.experimental.symbolic_shapes",
)
"""What loading a KV node imports later, most of it when the first model is built."""


def import_modules(config: DeploymentConfig) -> None:
    """Import torch, the engines, and what the nodes of this deployment need.

    Raises:
        ImportError: a library is missing.
    """
    import_module("workers.loading.engines")
    if EngineKind.KV in registry.graph(config.model).nodes.values():
        from workers.loading.lean_transformers import import_transformers  # noqa: PLC0415 - a second or two

        import_transformers()
        for name in _OF_KV_ENGINES:
            import_module(name)
    if registry.is_built_in(config.model):  # the modules of other packages may start threads
        registry.module(config.model, "nodes")
        registry.module(config.model, "processing")
