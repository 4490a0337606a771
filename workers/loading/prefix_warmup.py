"""Beginnings that are computed before a worker is ready: `model_kwargs.warm`.

They go through the engine as a request's prompt does, all at once. What is kept of them is the prefix
cache's, and may be given up there for what is used more.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from configs.deployment import ConfigError
from models.base import Processing
from models.sequence_request import PrepareRequest
from shared.errors import ClientError
from shared.events import Inputs, Params
from shared.tensors import read_ids
from workers.generation.engine_client import EngineClient
from workers.generation.generated_text import GeneratedText
from workers.generation.sequence_handle import SequenceHandle
from workers.kv_engine.sequence_spec import SequenceSpec

_LOGGER: Final = logging.getLogger(__name__)


async def warm(
    beginnings: Sequence[str | list[dict[str, Any]]],
    processing: Processing,
    rows: EngineClient,
    *,
    longest: int,
) -> int:
    """Compute all of them; how many tokens of them are kept then. `longest` is what the KV pool holds.

    Raises:
        ConfigError: one of them is no prompt of this model, or too long.
    """
    begun: list[SequenceHandle] = []
    for place, beginning in enumerate(beginnings):
        try:
            ids = await asyncio.to_thread(_ids_of, processing, beginning)
            if len(ids) > longest:
                raise ClientError(f"expected at most the KV cache's {longest} tokens, found {len(ids)}")
        except ClientError as error:
            raise ConfigError(f"model_kwargs.warm[{place}]: {error.message}") from error
        key = f"warm.{place}"
        row = SequenceHandle(key, GeneratedText(processing.text_decoder(), max_tokens=0), None)
        rows.submit(SequenceSpec(key=key, prompt_ids=ids, max_tokens=0, caches_prompt=True), row)
        begun.append(row)
    for row in begun:
        await row.ended
    kept = sum(row.cached_tokens for row in begun)
    _LOGGER.info("computed %d beginnings; %d tokens of them are kept", len(begun), kept)
    return kept


def _ids_of(processing: Processing, beginning: str | list[dict[str, Any]]) -> list[int]:
    """The tokens of a text as it stands, or of a chat as the template renders it."""
    inputs = Inputs(text=beginning, chat=False) if isinstance(beginning, str) else Inputs(messages=beginning)
    args = msgspec.to_builtins(PrepareRequest(inputs=inputs, params=Params(warm=True)))
    return read_ids(processing.run("prepare", "warm", {}, args).outputs["token_ids"])
