"""The settings of a reranker's folder, as transformers and sentence-transformers write them. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from models.checkpoints.files import CheckpointError, read_json, read_json_if_present
from models.reranker.graph import LANGUAGE_MODEL, is_qwen
from models.text.embedding import modules_of
from models.text_encoder.folder import max_positions, prompts_of

Activation = Literal["sigmoid", "identity", "tanh"]
_ACTIVATIONS: Final[Mapping[str, Activation]] = {"Sigmoid": "sigmoid", "Identity": "identity", "Tanh": "tanh"}
_JUDGE_TOKENS: Final = 8192
"""The longest prompt of Qwen3-Reranker as published, which is less than the model's own context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankerFolder:
    """The settings of a folder.

    Attributes:
        is_judge: a language model that answers yes or no; otherwise a cross-encoder.
        activation: of the scores.
        max_tokens: the longest pair, with special tokens.
        answers: of a judge: the ids of the tokens for yes and no, if the folder has them.
        prompt: of a cross-encoder: the text before each query.
    """

    is_judge: bool
    activation: Activation
    max_tokens: int
    answers: tuple[int, int] | None = None
    prompt: str = ""


def read(checkpoint: Path) -> RerankerFolder:
    """Read the settings of a folder.

    Raises:
        CheckpointError: a file is malformed, the model has several labels, or its activation is unknown.
    """
    config = read_json(checkpoint / "config.json")
    architecture = str((config.get("architectures") or [""])[0])
    is_judge = architecture.endswith(LANGUAGE_MODEL)
    if not is_judge:
        _check_labels(checkpoint, config)
    answers = _answers(checkpoint) if is_judge else None
    if is_judge and answers is None and not is_qwen(config):
        raise CheckpointError(
            f"{checkpoint}: expected a Qwen3ForCausalLM, whose prompt for ranking is known, or a folder with "
            f"a module LogitScore and a chat template, found {architecture}"
        )
    stated = _JUDGE_TOKENS if is_judge and answers is None else _stated_tokens(checkpoint)
    return RerankerFolder(
        is_judge=is_judge,
        activation=_activation(checkpoint, config),
        max_tokens=min(max_positions(config), stated or 2**20),
        answers=answers,
        prompt="" if is_judge else _default_prompt(checkpoint),
    )


def _default_prompt(checkpoint: Path) -> str:
    prompts, name = prompts_of(checkpoint)
    return prompts[name] if name else ""


def _check_labels(checkpoint: Path, config: Mapping[str, Any]) -> None:
    """Refuse a classifier with several labels; without a number, transformers assumes two."""
    names = config.get("id2label")
    labels = len(names) if isinstance(names, dict) else config.get("num_labels", 2)
    if labels != 1:
        raise CheckpointError(
            f"{checkpoint / 'config.json'}: expected a reranker, whose id2label has one label, found "
            f"{labels}: a classifier is not served"
        )


def _activation(checkpoint: Path, config: Mapping[str, Any]) -> Activation:
    """The activation under its present name, or those of older versions of sentence-transformers."""
    own = read_json_if_present(checkpoint / "config_sentence_transformers.json").get("activation_fn")
    of_config = config.get("sentence_transformers")
    older = of_config.get("activation_fn") if isinstance(of_config, dict) else None
    named = own or older or config.get("sbert_ce_default_activation_function") or "torch.nn.Sigmoid"
    known = _ACTIVATIONS.get(str(named).rpartition(".")[2])
    if known is None or not str(named).startswith("torch."):
        raise CheckpointError(
            f"{checkpoint}: expected an activation of scores of torch.nn: {', '.join(_ACTIVATIONS)}; "
            f"found {named!r}"
        )
    return known


def _stated_tokens(checkpoint: Path) -> int | None:
    """The longest pair as the folder states it."""
    of_module = read_json_if_present(checkpoint / "sentence_bert_config.json").get("max_seq_length")
    of_tokenizer = read_json_if_present(checkpoint / "tokenizer_config.json").get("model_max_length")
    stated = (of_module, of_tokenizer)
    return next((int(one) for one in stated if isinstance(one, int | float) and 0 < one < 2**31), None)


def _answers(checkpoint: Path) -> tuple[int, int] | None:
    """The tokens of the module `LogitScore`; None if the folder has none.

    Raises:
        CheckpointError: it names one token alone.
    """
    for module in modules_of(checkpoint):
        if module.kind != "LogitScore":
            continue
        path = checkpoint / module.path / "config.json"
        config = read_json(path)
        found = config.get("true_token_id"), config.get("false_token_id")
        if not all(isinstance(id, int) for id in found):
            raise CheckpointError(
                f"{path}: expected integers in true_token_id and false_token_id, found {found}"
            )
        return int(found[0]), int(found[1])  # type: ignore[arg-type]
    return None
