"""Settings of one KV engine. Imports no torch."""

from dataclasses import dataclass
from typing import Final

DECODE_SLOWDOWN_LIMIT: Final = 1.7
"""The default of `KVEngineConfig.decode_slowdown_limit`."""
MAX_PASS_TOKENS: Final = 12_544
"""The default of `KVEngineConfig.max_pass_tokens`: three branches of an image of 1024 x 1024, 4,098 each."""

DEFAULT_STATE_SNAPSHOTS: Final = 16
"""The default of `KVEngineConfig.state_snapshots`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEngineConfig:
    """Sizes and policies of a KV engine; `workers.loading.engines` derives them from a deployment's settings.

    Attributes:
        num_blocks, block_size: the size of the KV pool: so many blocks, of so many tokens each.
        max_step_tokens: the most tokens that one step computes.
        max_sequences: the most sequences that run at once.
        cpu_cores: on a CPU, how many of the machine's cores the engine uses; None is all of them.
        prefix_cache: keep keys and values for later sequences that begin with the same tokens.
        decode_slowdown_limit: how many times as long as its decodes alone a step with prompts may take
            (`workers.kv_engine.prefill_budget`); None is without a limit.
        max_pass_tokens: the most tokens of the passes of programs in one step, in addition to
            `max_step_tokens`; a pass is never split.
        state_snapshots: the slots for snapshots of recurrent states; unused by a node without any.
        adapter_bytes: the most memory of LoRA adapters; 0: the node takes none.
        speculative_tokens: the most tokens that are drafted per sequence and step; unused without a proposer.
        drafts_have_to_pay: draft only as many as measured costs and acceptance make worthwhile.
    """

    num_blocks: int
    block_size: int
    max_step_tokens: int
    max_sequences: int
    cpu_cores: int | None = None
    prefix_cache: bool = True
    decode_slowdown_limit: float | None = DECODE_SLOWDOWN_LIMIT
    state_snapshots: int = DEFAULT_STATE_SNAPSHOTS
    speculative_tokens: int = 4
    drafts_have_to_pay: bool = False
    max_pass_tokens: int = MAX_PASS_TOKENS
    adapter_bytes: int = 0
