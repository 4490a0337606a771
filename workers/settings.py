"""A worker's own settings: the `model_kwargs` of the deployment, checked.

A family's own keys stand beside the engine's: its graph names them, its nodes read them.

Knows no torch: a misspelt key is told before anything is loaded.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from configs.deployment import ConfigError, DeploymentConfig, neighbour
from models import registry
from shared.validation_errors import misfit


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a rank's engines are set up.

    Attributes:
        dtype: of the weights and the KV pool; `auto` is what suits device and checkpoint.
        device: of ranks that `devices` does not name; `auto` is the GPU of this rank where there is one,
            else the CPU.
        block_size: tokens per block of the KV pool.
        max_step_tokens: the most tokens one step computes; None suits the device.
        max_rows: the most sequences that run at a time; None suits the device.
        prefix_cache: whether what was computed of a text is kept for others that begin alike.
        warm: beginnings that are computed before the rank is ready: texts as they stand, or chats, which
            the checkpoint's template renders.
        stretch: how many times as long a step with prompts may take as decodes alone would, those who wait
            counted among them; None is without limit.
        speculate: so many tokens at most are guessed ahead for each answer in a step; 0 is none.
        draft: a folder with a smaller checkpoint that guesses; without one, what followed the same tokens
            before is guessed.
        kernels: who computes a model's layers: `auto` is our own kernels where they know the model and the
            processor; `torch` is torch.
        attention: who attends over the KV pool of a GPU, whoever computes the layers: `triton` is our kernel,
            `flashinfer` FlashInfer; `auto` is our kernel where it can, else torch.
        cuda_graphs: whether, on a GPU, steps of decodes are recorded at start and replayed.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    max_step_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_rows: Annotated[int, Meta(ge=1, le=4096)] | None = None
    prefix_cache: bool = True
    warm: list[Annotated[str, Meta(min_length=1)] | list[dict[str, Any]]] = []
    stretch: Annotated[float, Meta(ge=1, le=1000)] | None = 1.7
    speculate: Annotated[int, Meta(ge=0, le=32)] = 0
    draft: str | None = None
    kernels: Literal["auto", "torch"] = "auto"
    attention: Literal["auto", "triton", "flashinfer"] = "auto"
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        if self.warm and not self.prefix_cache:
            raise ValueError("warm: expected none where prefix_cache is false, for nothing would be kept")

    def rows_on(self, device_type: str) -> int:
        """How many sequences run at a time on such a device."""
        return self.max_rows or (256 if device_type == "cuda" else 64)

    def step_tokens_on(self, device_type: str) -> int:
        """The token budget of a step on such a device.

        Raises:
            ConfigError: less than one token for each row.
        """
        rows = self.rows_on(device_type)
        # Beside everybody who decodes: a prompt must not wait for the next step by one token.
        tokens = self.max_step_tokens or rows + (4096 if device_type == "cuda" else 2048)
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
