"""Models that score pairs, over packed tokens: nothing is padded.

CrossScorer    a classifier of transformers with one label: its own head over the packed states
YesNoScorer    a language model: the logit of `yes` above that of `no` after the prompt
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions as Output

from models.checkpoints.files import CheckpointError, read_json
from models.checkpoints.progress import Progress
from models.reranker.graph import CLASSIFIER, LANGUAGE_MODEL
from models.text_encoder.backbone import load_model
from models.text_encoder.packed import PackedEncoder, Texts
from models.transformers_lm.architecture import model_class_of

_TRIAL: Final = ([3, 4, 5], [6, 3, 5], [5, 7, 3, 8, 4])
"""Token ids that every vocabulary has."""
_LIKE: Final = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
_NO_PADDING: Final = -1
"""An id that no token has: a class that looks for the last token that is no padding finds the last one."""


class Scorer(Protocol):
    """Scores pairs, before any activation."""

    def scores(self, texts: Texts, types: Texts | None) -> torch.Tensor:
        """The scores of pairs, (pairs,) float32, of their token ids and token types."""
        ...


class _Computed(torch.nn.Module):
    """Stands for the backbone of a classifier: returns states that were computed before."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.pooler = getattr(backbone, "pooler", None)
        self.states: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Output:
        pooled = self.pooler(self.states) if self.pooler is not None else None
        return Output(last_hidden_state=self.states, pooler_output=pooled)


class CrossScorer:
    """A cross-encoder. A class whose head cannot be given states computes pairs of equal length together."""

    def __init__(self, model: Any) -> None:
        model.config.pad_token_id = _NO_PADDING
        self._model: Final = model
        backbone, implementation = model.base_model, model.base_model.config._attn_implementation  # noqa: SLF001
        expected = self._stock(_TRIAL, None)
        self._encoder: PackedEncoder | None = PackedEncoder(model)
        self._computed: Final = _Computed(backbone)
        setattr(model, model.base_model_prefix, self._computed)
        if not self._is_alike(expected):
            self._encoder = None
            setattr(model, model.base_model_prefix, backbone)
            backbone.set_attn_implementation(implementation)

    @property
    def is_packed(self) -> bool:
        """Return whether pairs of unlike lengths are computed together."""
        return self._encoder is not None

    @torch.inference_mode()
    def scores(self, texts: Texts, types: Texts | None) -> torch.Tensor:
        """The scores of pairs; see `Scorer`."""
        if self._encoder is None:
            return self._stock(texts, types)
        states = self._encoder.states(texts, types)
        found = torch.empty(len(texts), device=states[0].device)
        for group in _of_equal_length(texts):
            self._computed.states = torch.stack([states[index] for index in group])
            found[group] = self._logits([texts[index] for index in group], {})
        self._computed.states = None
        return found

    @torch.inference_mode()
    def _stock(self, texts: Texts, types: Texts | None) -> torch.Tensor:
        """The scores by the class as it is."""
        found = torch.empty(len(texts), device=self._model.device)
        for group in _of_equal_length(texts):
            given = {} if types is None else {"token_type_ids": self._row(types, group)}
            found[group] = self._logits([texts[index] for index in group], given)
        return found

    def _row(self, texts: Texts, group: Sequence[int]) -> torch.Tensor:
        return torch.tensor([texts[index] for index in group], device=self._model.device)

    def _logits(self, texts: Texts, given: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = torch.tensor([*texts], device=self._model.device)
        logits: torch.Tensor = self._model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits
        return logits[:, 0].float()

    def _is_alike(self, expected: torch.Tensor) -> bool:
        try:
            found = self.scores(_TRIAL, None)
        except Exception:  # noqa: BLE001 - classes refuse in ways of their own
            return False
        largest = float((found - expected).abs().max())
        return largest <= _LIKE.get(self._model.dtype, 0.0) * max(1.0, float(expected.abs().max()))


class YesNoScorer:
    """A language model that judges: the difference of two logits of the last token.

    Args:
        model: a causal language model of transformers.
        answers: the tokens for yes and no.
    """

    def __init__(self, model: Any, answers: tuple[int, int]) -> None:
        self._encoder: Final = PackedEncoder(model)
        head = model.get_output_embeddings()
        yes, no = answers
        self._direction: Final[torch.Tensor] = (head.weight[yes].float() - head.weight[no].float()).detach()
        bias = getattr(head, "bias", None)
        self._bias: Final = float(bias[yes] - bias[no]) if bias is not None else 0.0

    @torch.inference_mode()
    def scores(self, texts: Texts, types: Texts | None) -> torch.Tensor:
        """The scores of prompts; see `Scorer`. There are no token types."""
        last = torch.stack([states[-1] for states in self._encoder.states(texts)])
        return last.float() @ self._direction + self._bias


def load_scorer(
    checkpoint: Path,
    *,
    answers: tuple[int, int] | None,
    is_judge: bool,
    device: str | torch.device,
    dtype: str,
    progress: Progress,
) -> Scorer:
    """Load the model of a folder; `answers` are those of a judge.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported, or there are no answers.
    """
    kind = LANGUAGE_MODEL if is_judge else CLASSIFIER
    model_class = model_class_of(read_json(checkpoint / "config.json"), checkpoint, kind, what="reranker")
    if is_judge and answers is None:
        raise CheckpointError(f"{checkpoint}: expected the tokens yes and no in the vocabulary, found none")
    model = load_model(checkpoint, device=device, dtype=dtype, progress=progress, model_class=model_class)
    return YesNoScorer(model, answers) if answers is not None and is_judge else CrossScorer(model)


def _of_equal_length(texts: Texts) -> list[list[int]]:
    """The numbers of texts, in groups of equal length."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    return [[*group] for _, group in groupby(order, key=lambda index: len(texts[index]))]
