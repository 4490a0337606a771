"""The imports of each role: what its template has in place before it forks the first process."""

from collections.abc import Callable
from functools import partial
from importlib import import_module

from configs.deployment import DeploymentConfig
from dalsegno.config import environment


def of_roles(config: DeploymentConfig) -> dict[str, Callable[[], None]]:
    """By role, a function that imports what the role's processes need; none where no template is wanted."""
    if not config.recovery.templates:
        return {}
    return {
        "worker": partial(_import_worker, config),
        "conductor": partial(_import_conductor, config),
        "gateway": partial(_import, "gateway.app"),
    }


def _import(module: str) -> None:
    # Libraries that read the environment when they are imported must see that of a role.
    environment.replace(environment.for_child(credentials=None))
    for name in ("dalsegno.roles.role_process", "uvloop", module):
        import_module(name)


def _import_conductor(config: DeploymentConfig) -> None:
    _import("conductor.process")
    from conductor import digests
    from models import registry

    if registry.is_built_in(config.model):  # sources of other packages are read after the fork
        digests.read_sources(config.model)


def _import_worker(config: DeploymentConfig) -> None:
    _import("workers.process")
    from workers.loading import early_imports

    early_imports.import_modules(config)
