"""Prefix warm-up: prefixes that are computed before a worker is ready (`model_kwargs.warm_prefixes`).

The engine computes them as it computes prompts, all at once. The prefix cache keeps the result, and may evict
it later like any other entry.
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
    prefixes: Sequence[str | list[dict[str, Any]]],
    processing: Processing,
    client: EngineClient,
    *,
    node: str,
    longest: int,
) -> int:
    """Compute the prefixes, and return the number of their tokens that are cached.

    `node` is the KV node that computes them, `longest` the capacity of its KV pool in tokens.

    Raises:
        ConfigError: a prefix is no prompt of this model, or too long.
    """
    handles: list[SequenceHandle] = []
    for place, prefix in enumerate(prefixes):
        try:
            ids = await asyncio.to_thread(_ids_of, processing, prefix)
            if len(ids) > longest:
                raise ClientError(f"expected at most the KV cache's {longest} tokens, found {len(ids)}")
        except ClientError as error:
            raise ConfigError(f"model_kwargs.warm_prefixes[{place}]: {error.message}") from error
        key = f"warm.{place}"
        handle = SequenceHandle(key, GeneratedText(processing.text_decoder(), max_tokens=0), None)
        spec = SequenceSpec(key=key, node=node, prompt_ids=ids, max_tokens=0, caches_prompt=True)
        client.submit(spec, handle)
        handles.append(handle)
    for handle in handles:
        await handle.ended
    cached = sum(handle.cached_tokens for handle in handles)
    _LOGGER.info("warmed %d prefixes; %d of their tokens are cached", len(handles), cached)
    return cached


def _ids_of(processing: Processing, prefix: str | list[dict[str, Any]]) -> list[int]:
    """Return the tokens of a raw text, or of a chat as the template renders it."""
    inputs = Inputs(text=prefix, chat=False) if isinstance(prefix, str) else Inputs(messages=prefix)
    args = msgspec.to_builtins(PrepareRequest(inputs=inputs, params=Params(warm=True)))
    return read_ids(processing.run("prepare", "warm", {}, args).handle("token_ids"))
