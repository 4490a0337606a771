"""A worker's own settings: the `model_kwargs` of the deployment, checked.

A family's own keys stand beside the engine's: its graph names them, its nodes read them.

Knows no torch: a misspelt key is told before anything is loaded.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shared.config import ConfigError, DeploymentConfig, neighbour
from shared.misfit import misfit
from shared.models import registry


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a rank's engines are set up.

    Attributes:
        dtype: of the weights and the KV pool; `auto` is what suits device and checkpoint.
        device: of ranks that `devices` does not name; `auto` is the GPU of this rank where there is one,
            else the CPU.
        block_size: tokens per block of the KV pool.
        max_step_tokens: the most tokens one step computes; None suits the device.
        max_rows: the most sequences that run at a time; None suits the device.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    max_step_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_rows: Annotated[int, Meta(ge=1, le=4096)] | None = None

    def rows_on(self, device_type: str) -> int:
        """How many sequences run at a time on such a device."""
        return self.max_rows or (256 if device_type == "cuda" else 64)

    def step_tokens_on(self, device_type: str) -> int:
        """The token budget of a step on such a device.

        Raises:
            ConfigError: less than one token for each row.
        """
        rows = self.rows_on(device_type)
        tokens = self.max_step_tokens or max(rows, 4096 if device_type == "cuda" else 512)
        if tokens < rows:
            raise ConfigError(
                f"model_kwargs.max_step_tokens is {tokens}: expected at least max_rows, which is {rows}"
            )
        return tokens


def of(config: DeploymentConfig) -> EngineSettings:
    """The settings of a deployment.

    Raises:
        ConfigError: an unknown key, or a value that cannot be; names it, and what would be right.
    """
    return parse(config.model_kwargs, registry.graph(config.model).kwargs)


def parse(kwargs: Mapping[str, Any], own: Collection[str] = ()) -> EngineSettings:
    """The engine's settings in `model_kwargs`; `own` are keys of the family (`ModelGraph.kwargs`).

    Raises:
        ConfigError: an unknown key, or a value that cannot be; names it, and what would be right.
    """
    known = [*(field.name for field in msgspec.structs.fields(EngineSettings)), *sorted(own)]
    for key in kwargs:
        if key not in known:
            hint = neighbour(str(key), dict(zip(known, known, strict=True)))
            raise ConfigError(f"model_kwargs: unknown key {key}; {hint}")
    given = {key: value for key, value in kwargs.items() if key not in own}
    try:
        return msgspec.convert(given, EngineSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"model_kwargs.{misfit(error, given, EngineSettings).message}") from error
