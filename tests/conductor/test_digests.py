"""A template reads the sources once, for all conductors that it forks."""

from conductor import digests
from conductor.deployment import deployment_of
from configs.deployment import DeploymentConfig
from configs.placement import NodeGroup
from models import registry
from shared import source_digest


def test_nothing_is_left_to_digest_once_the_sources_are_read() -> None:
    for kept in (source_digest.digest, digests.core_digest, registry.plan_digest):
        kept.cache_clear()
    config = DeploymentConfig(
        model="decoder_lm",
        checkpoint="/nowhere",
        name="demo",
        max_seq_len=64,
        node_groups=[NodeGroup(node_names=["prepare", "llm"], ranks=[0])],
    )

    digests.read_sources("decoder_lm")
    read = source_digest.digest.cache_info().misses
    assert digests.fold_digest(deployment_of(config, max_event_bytes=4096))

    assert read == 3, "the decisions, the fold, the plan"
    assert source_digest.digest.cache_info().misses == read
