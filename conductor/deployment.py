"""The core's view of a deployment, built from its configuration."""

from conductor.core.schedule import Deployment
from conductor.digests import core_digest
from configs.adapters import configured
from configs.deployment import DeploymentConfig
from configs.placement import absent_nodes
from models import registry
from models.base import EngineKind
from shared.events import Limits


def deployment_of(config: DeploymentConfig, *, max_event_bytes: int) -> Deployment:
    """Build the core's view of a configuration, with the digests that requests pin.

    `max_event_bytes` is the log's limit for one event. A request with a larger order fails.
    """
    graph = registry.graph(config.model)
    return Deployment(
        model=config.name,
        family=config.model,
        groups=config.groups,
        kv_nodes=frozenset(node for node, kind in graph.nodes.items() if kind is EngineKind.KV),
        limits=Limits(
            max_seq_len=config.max_seq_len,
            kv_tokens=config.kv_tokens or config.max_seq_len,
            default_max_tokens=config.default_max_tokens,
            max_attempts=config.max_attempts,
            max_event_bytes=max_event_bytes,
            walk_timeouts_s=config.walk_timeouts_s,
            absent_nodes=tuple(sorted(absent_nodes(config.groups, graph))),
        ),
        max_concurrent_requests=config.max_concurrent_requests,
        replicas=config.scheduling.replicas,
        max_per_replica=config.scheduling.max_in_flight_per_replica,
        max_waiting=config.scheduling.max_waiting,
        shorten_above=config.scheduling.shorten_above,
        shorten_to=config.scheduling.shorten_to,
        adapters=configured(config),
        takes_adapters=config.takes_adapters,
        graph_digest=graph.digest,
        plan_digest=registry.plan_digest(config.model),
        config_digest=config.digest,
        core_digest=core_digest(),
    )
