"""The size of the KV pool, by the free memory. Pure.

    configured       `kv_tokens`, if it fits
    on a GPU         85 % of the memory that is free after loading the weights; the rest is for activations
    on a CPU         at most 25 % of the available memory, and no more than is useful: sequences of up to 4096
    tokens each,
                     but at least four of the longest

If a device has several pools, each leaves the others the same share. The pool is never larger than
all sequences at full length. A pool below the longest sequence is allowed and logged: such requests are
refused.
"""

from dataclasses import dataclass
from typing import Final

from configs.deployment import ConfigError

GPU_SHARE: Final = 0.85
CPU_SHARE: Final = 0.25
_USEFUL_ROW_TOKENS: Final = 4096
_LONGEST_AT_LEAST: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """The chosen size, and the reason in one line."""

    blocks: int
    tokens: int
    reason: str


def pool_size(
    *,
    configured_tokens: int | None,
    free_bytes: int,
    bytes_per_token: int,
    block_size: int,
    max_sequences: int,
    max_seq_len: int,
    on_gpu: bool,
    sharers: int = 1,
) -> PoolSize:
    """Choose the size; `sharers` is the number of pools on the device, this one included.

    Raises:
        ConfigError: `kv_tokens` does not fit, or there is no memory for a single block.
    """
    fits = free_bytes // bytes_per_token

    def share(of_all: float) -> str:
        among = f"one of {sharers} shares of " if sharers > 1 else ""
        return f"{among}{of_all:.0%} of {_gib(free_bytes)}"

    if configured_tokens is not None:
        if configured_tokens > fits:
            raise ConfigError(
                f"kv_tokens is {configured_tokens}, which takes {_gib(configured_tokens * bytes_per_token)}, "
                f"but {_gib(free_bytes)} are free: at most {fits} tokens fit"
            )
        wanted, why = configured_tokens, "as configured"
    elif on_gpu:
        wanted, why = int(fits * GPU_SHARE / sharers), f"{share(GPU_SHARE)} free GPU memory"
    else:
        useful = max(max_sequences * min(max_seq_len, _USEFUL_ROW_TOKENS), _LONGEST_AT_LEAST * max_seq_len)
        wanted, why = useful, f"{max_sequences} sequences"
        if useful > fits * CPU_SHARE / sharers:
            wanted, why = int(fits * CPU_SHARE / sharers), f"{share(CPU_SHARE)} available memory"
    if configured_tokens is None and wanted > max_sequences * max_seq_len:
        wanted, why = max_sequences * max_seq_len, f"{max_sequences} sequences of {max_seq_len} tokens"
    # A configured size is rounded up to whole blocks, a chosen one down.
    blocks = -(-wanted // block_size) if configured_tokens is not None else wanted // block_size
    if blocks < 1:
        raise ConfigError(
            f"{_gib(free_bytes)} of free memory are too little for a KV pool: one block of {block_size} "
            f"tokens takes {block_size * bytes_per_token} bytes"
        )
    tokens = blocks * block_size
    reason = f"{tokens} tokens in {blocks} blocks, {_gib(tokens * bytes_per_token)} ({why})"
    return PoolSize(blocks=blocks, tokens=tokens, reason=reason)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
