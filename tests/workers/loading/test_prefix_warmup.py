"""What a rank computes before it is ready, and what it costs who asks then."""

import asyncio
from typing import Any

import pytest

from configs.deployment import ConfigError, DeploymentConfig, NodeGroup
from tests.tiny import tiny_checkpoint
from workers import settings
from workers.generation.engine_client import EngineClient
from workers.generation.generated_text import GeneratedText
from workers.generation.sequence_handle import SequenceHandle
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.loading.model import LocalModel
from workers.loading.prefix_warmup import _ids_of

CHAT = [{"role": "system", "content": "You are kind. " * 8}]
TEXT = "What does len do? " * 6


def config(warm: list[Any]) -> DeploymentConfig:
    return DeploymentConfig(
        model="decoder_lm",
        checkpoint=str(tiny_checkpoint("qwen3")),
        max_seq_len=256,
        kv_tokens=2048,
        model_kwargs={"warm_prefixes": warm, "block_size": 4},
        node_groups=[NodeGroup(node_names=["prepare", "llm"], ranks=[0])],
    )


async def test_texts_and_chats_are_kept_before_the_rank_is_ready() -> None:
    how, rows = config([TEXT, CHAT]), EngineClient()
    model = LocalModel(how, settings.of(how), 0)
    try:
        async with asyncio.timeout(60):
            found = await model.load(rows)
            beginnings: list[Any] = [TEXT, CHAT]
            for number, beginning in enumerate(beginnings):
                ids = _ids_of(found.processing, beginning)
                before = model.counters()
                assert before is not None
                hits = before.cache.hits
                row = SequenceHandle(
                    f"r{number}", GeneratedText(found.processing.text_decoder(), max_tokens=1), None
                )
                rows.submit(SequenceSpec(key=row.key, prompt_ids=[*ids, 5], max_tokens=1), row)
                await row.ended
                after = model.counters()
                assert after is not None
                assert after.cache.hits - hits == len(ids) // 4 * 4 > 16
    finally:
        await model.close()


@pytest.mark.parametrize("wrong", [[{"role": "nobody"}], "x" * 4000])
async def test_what_is_no_prompt_ends_the_start_and_says_which(wrong: Any) -> None:
    how = config([TEXT, wrong])
    model = LocalModel(how, settings.of(how), 0)
    try:
        with pytest.raises(ConfigError, match=r"model_kwargs\.warm_prefixes\[1\]"):
            async with asyncio.timeout(60):
                await model.load(EngineClient())
    finally:
        await model.close()
