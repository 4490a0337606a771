"""The files of a sentence-transformers folder: its modules, prompts and lengths. No torch.

A folder without `modules.json` has what sentence-transformers assumes of it: the mean of the states.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from models.checkpoints.files import CheckpointError, read_json, read_json_if_present, text_config
from models.text.embedding import Module, modes_of, modules_of

POOLING_MODES: Final = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
MODEL_FILES: Final = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""The names of the configuration of the module `Transformer`, the present one first."""
SETTINGS: Final = "config_sentence_transformers.json"
"""The name of the configuration of a folder as a whole."""
_PACKAGE: Final = "sentence_transformers."
_COUNTED_FROM_PADDING: Final = frozenset(
    {
        "camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta",
        "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
    }
)  # fmt: skip
"""Models whose first position is the one behind the padding token's id."""
_Size = Annotated[int, Meta(ge=1)]


class Dense(msgspec.Struct, frozen=True, kw_only=True):
    """A linear layer with an activation: the configuration of the module, and its folder."""

    in_features: _Size
    out_features: _Size
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    module_input_name: str = "sentence_embedding"
    module_output_name: str | None = None
    use_residual: bool = False
    path: str = ""


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A normalization of each vector by its mean and variance, with weights in the module's folder."""

    dimension: int
    path: str


@dataclass(frozen=True, slots=True)
class Normalize:
    """A scaling of each vector to length 1."""


Stage = Dense | LayerNorm | Normalize
"""A module behind the pooling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceFolder:
    """The settings of a folder.

    Attributes:
        modes: the pooling modes; the vectors of several are joined.
        include_prompt: the tokens of the prompt are pooled as well.
        stages: the modules behind the pooling.
        size: the most dimensions of an embedding.
        default_size: the leading dimensions of an embedding without a choice; None: all.
        sizes: the smaller dimensions that may be asked for, by `config.json`; None: any.
        prompts: texts that are put before each text, by name.
        default_prompt: the name of the one that is used without a choice; empty: none is.
        max_tokens: the longest text, with special tokens, as the folder states it; None: it does not.
        max_positions: the longest text that the model can take.
        lower_case: texts are made lower-case first.
        truncates: longer texts are cut without an error.
    """

    modes: tuple[str, ...] = ("mean",)
    include_prompt: bool = True
    stages: tuple[Stage, ...] = ()
    size: int = 0
    default_size: int | None = None
    sizes: tuple[int, ...] | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    max_tokens: int | None = None
    max_positions: int
    lower_case: bool = False
    truncates: bool = False

    @property
    def is_normalized(self) -> bool:
        """Return whether embeddings have length 1: a layer behind a scaling undoes it."""
        return bool(self.stages) and isinstance(self.stages[-1], Normalize)


def read(checkpoint: Path) -> SentenceFolder:
    """Read the settings of a folder.

    Raises:
        CheckpointError: a file is malformed, or a module is not supported.
    """
    config = read_json(checkpoint / "config.json")
    modules = modules_of(checkpoint)
    modes, include_prompt, stages = _after_model(checkpoint, modules)
    prompts, default_prompt = prompts_of(checkpoint)
    of_model = model_settings(checkpoint)
    hidden = _hidden_size(config)
    widths = [stage.out_features for stage in stages if isinstance(stage, Dense)]
    return SentenceFolder(
        modes=modes,
        include_prompt=include_prompt,
        stages=stages,
        size=widths[-1] if widths else hidden * len(modes),
        default_size=_default_size(checkpoint),
        sizes=_sizes(config),
        prompts=prompts,
        default_prompt=default_prompt,
        max_tokens=stated_length(checkpoint, of_model) if modules else None,
        max_positions=max_positions(config),
        lower_case=of_model.get("do_lower_case") is True,
        truncates=bool(modules),
    )


def max_positions(config: Mapping[str, Any]) -> int:
    """The longest text of a model by its `config.json`, in tokens; a large number if it has no limit."""
    own = text_config(config)
    longest = own.get("max_position_embeddings")
    if not isinstance(longest, int) or longest < 1:
        return 2**20
    padding = own.get("pad_token_id", 1)
    is_shifted = own.get("model_type") in _COUNTED_FROM_PADDING and isinstance(padding, int)
    return longest - padding - 1 if is_shifted else longest


def _after_model(checkpoint: Path, modules: list[Module]) -> tuple[tuple[str, ...], bool, tuple[Stage, ...]]:
    """The pooling modes, `include_prompt`, and the modules behind the pooling."""
    if not modules:
        return ("mean",), True, ()
    path = checkpoint / "modules.json"
    for module in modules:
        if not module.type.startswith(_PACKAGE):
            raise CheckpointError(
                f"{path}: {module.type} is not supported: expected modules of sentence-transformers itself "
                "(remote code is never run)"
            )
    kinds = [module.kind for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or modules[0].path:
        raise CheckpointError(
            f"{path}: expected 'Transformer' in the folder itself and then 'Pooling', found "
            f"{', '.join(kinds[:2])} in {modules[0].path or 'the folder itself'!r}"
        )
    pooling = checkpoint / modules[1].path / "config.json"
    modes = tuple(modes_of(pooling))
    if unknown := set(modes) - set(POOLING_MODES):
        raise CheckpointError(
            f"{pooling}: expected pooling modes of {', '.join(POOLING_MODES)}, found {', '.join(unknown)}"
        )
    include_prompt = read_json(pooling).get("include_prompt", True) is True
    stages = (_stage(checkpoint, module) for module in modules[2:])
    return modes, include_prompt, tuple(stage for stage in stages if stage is not None)


def _stage(checkpoint: Path, module: Module) -> Stage | None:
    """The stage of a module; None for `Dropout`, which does nothing outside of training."""
    config = checkpoint / module.path / "config.json"
    match module.kind:
        case "Dense":
            return _dense(config, module.path)
        case "LayerNorm":
            dimension = read_json(config).get("dimension")
            if not isinstance(dimension, int):
                raise CheckpointError(f"{config}: expected an integer in dimension, found {dimension!r}")
            return LayerNorm(dimension, module.path)
        case "Normalize":
            return Normalize()
        case "Dropout":
            return None
        case _:
            raise CheckpointError(
                f"{checkpoint / 'modules.json'}: {module.kind!r} is not supported after the pooling: "
                "expected Dense, LayerNorm, Normalize or Dropout"
            )


def _dense(config: Path, path: str) -> Dense:
    try:
        found = msgspec.convert(read_json(config) | {"path": path}, Dense)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{config}: expected the settings of a Dense module: {error}") from error
    if {found.module_input_name, found.module_output_name or found.module_input_name} != {
        "sentence_embedding"
    }:
        raise CheckpointError(
            f"{config}: expected a layer over sentence_embedding, found {found.module_input_name!r}"
        )
    return found


def model_settings(checkpoint: Path) -> Mapping[str, Any]:
    """The settings of the module `Transformer`."""
    found = next((checkpoint / name for name in MODEL_FILES if (checkpoint / name).is_file()), None)
    settings = read_json(found) if found is not None else {}
    modalities = settings.get("modality_config", {"text": {}})
    if not isinstance(modalities, dict) or set(modalities) != {"text"}:
        raise CheckpointError(f"{found}: expected a model of texts alone, found {list(modalities)}")
    return settings


def stated_length(checkpoint: Path, settings: Mapping[str, Any]) -> int | None:
    """The longest text as the folder states it: of the module, else of the tokenizer."""
    of_tokenizer = read_json_if_present(checkpoint / "tokenizer_config.json").get("model_max_length")
    stated = (settings.get("max_seq_length"), of_tokenizer)
    return next((int(one) for one in stated if isinstance(one, int | float) and 0 < one < 2**31), None)


def prompts_of(checkpoint: Path) -> tuple[Mapping[str, str], str]:
    """The prompts of a folder by name, and the name of the default one, or empty.

    Raises:
        CheckpointError: they are malformed.
    """
    path = checkpoint / SETTINGS
    config = read_json_if_present(path)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name") or ""
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"{path}: expected texts in prompts, by name, found {prompts!r:.200}")
    if default and default not in prompts:
        raise CheckpointError(
            f"{path}: expected default_prompt_name to be one of {', '.join(prompts)}, found {default!r}"
        )
    return prompts, default


def _default_size(checkpoint: Path) -> int | None:
    """The dimensions that the folder cuts embeddings to."""
    path = checkpoint / SETTINGS
    found = read_json_if_present(path).get("truncate_dim")
    if found is None or (isinstance(found, int) and found > 0):
        return found
    raise CheckpointError(f"{path}: expected a positive integer in truncate_dim, found {found!r:.80}")


def _hidden_size(config: Mapping[str, Any]) -> int:
    own = text_config(config)
    found = next((own[name] for name in ("hidden_size", "dim", "d_model", "n_embd") if name in own), 0)
    return found if isinstance(found, int) else 0


def _sizes(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    named = config.get("matryoshka_dimensions")
    return tuple(size for size in named if isinstance(size, int)) if isinstance(named, list) else None
