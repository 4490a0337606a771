"""The kit of text encoders: the states of the tokens of many texts, in few forwards and without padding.

    encoder = PackedEncoder.load(folder)
    first, second = encoder.states([[101, 7592, 102], [101, 2088, 999, 102]])    # (3, hidden), (4, hidden)

Texts are packed one behind the other into a row of T tokens, each with its own positions, and attend only to
themselves (`models.text_encoder.attention`). A forward costs what its tokens cost, and the states of a text
depend on the others by rounding only. Classes of transformers that cannot be packed run texts of equal length
together, unpadded too.
"""

import logging
from collections.abc import Iterator, Sequence
from inspect import signature
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Protocol, Self

import torch

from models.checkpoints.progress import Progress, silent
from models.text_encoder.attention import NAME, divided, positions_of, runs_of
from models.text_encoder.backbone import load_model
from models.text_encoder.mpnet import PackedMPNet, is_mpnet
from models.text_encoder.prepacked import prepack

_LOGGER: Final = logging.getLogger(__name__)
PACK_TOKENS: Final = {"cpu": 2048, "cuda": 16_384}
"""The most tokens of a forward of several texts, by the kind of device."""
_LIKE: Final = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""The largest relative difference between packed states and those of a stock forward, by dtype."""
_TRIED_WINDOW: Final = 512
"""The widest window that is tried at load: a trial of a wider one would take too long."""

Texts = Sequence[Sequence[int]]


class Forward(Protocol):
    """Computes the states of texts that are sorted by their length."""

    def __call__(self, texts: Texts, types: Texts | None) -> Sequence[torch.Tensor]: ...


class PackedEncoder:
    """A transformers encoder, causal or not, over packed texts. For one thread.

    Attributes:
        model: the model of transformers; a class with heads has its backbone as `model.base_model`.
        max_tokens: the most tokens of a forward of several texts.
    """

    def __init__(self, model: Any, *, max_tokens: int | None = None) -> None:
        self.model: Final = model
        self.max_tokens = max_tokens or PACK_TOKENS.get(self.device.type, PACK_TOKENS["cuda"])
        self._forward = _forward_of(model)

    @classmethod
    def load(
        cls,
        checkpoint: Path,
        *,
        device: str | torch.device = "cpu",
        dtype: str = "auto",
        progress: Progress = silent,
        model_class: Any = None,
    ) -> Self:
        """Load the model of a folder in Hugging Face format.

        `model_class` is a class of transformers, by default the one that `config.json` names without heads
        and pooler.

        Raises:
            CheckpointError: a file of the folder is missing, damaged or unsupported.
        """
        return cls(
            load_model(checkpoint, device=device, dtype=dtype, progress=progress, model_class=model_class)
        )

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.get_text_config().hidden_size)

    @torch.inference_mode()
    def states(self, texts: Texts, types: Texts | None = None) -> list[torch.Tensor]:
        """The states after the last layer of each text, (tokens, hidden), in the order of the texts.

        Args:
            texts: token ids, at least one of each text, special tokens included.
            types: the token types of each text; None: all are 0.
        """
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        found: dict[int, torch.Tensor] = {}
        for pack in self._packs(order, texts):
            states = self._forward(
                [texts[index] for index in pack],
                None if types is None else [types[index] for index in pack],
            )
            found |= dict(zip(pack, states, strict=True))
        return [found[index] for index in range(len(texts))]

    def _packs(self, order: Sequence[int], texts: Texts) -> Iterator[list[int]]:
        """Divide texts, given by their numbers, into packs of at most `max_tokens`, or a single text."""
        pack: list[int] = []
        tokens = 0
        for index in order:
            if pack and tokens + len(texts[index]) > self.max_tokens:
                yield pack
                pack, tokens = [], 0
            pack.append(index)
            tokens += len(texts[index])
        if pack:
            yield pack


def _forward_of(model: Any) -> Forward:
    """The forward over packed texts if the class allows it, which a trial shows; else over equal lengths."""
    stock = EqualLengths(model)
    if is_mpnet(model):
        prepack(model.base_model)
        return PackedMPNet(model)
    implementation = model.base_model.config._attn_implementation  # noqa: SLF001 - no public reader
    trial = _trial_of(model.base_model.config.get_text_config())
    expected = stock(trial, None)
    try:
        model.base_model.set_attn_implementation(NAME)
        packed = PackedForward(model)
        found = packed(trial, None)
    except Exception as error:  # noqa: BLE001 - classes refuse in ways of their own
        reason = f"{type(error).__name__}: {error}"
    else:
        if all(_are_alike(a, b) for a, b in zip(found, expected, strict=True)):
            prepack(model.base_model)
            return packed
        reason = "its states differ from those of a stock forward"
    model.base_model.set_attn_implementation(implementation)
    _LOGGER.info(
        "%s computes only texts of equal length together: %s", type(model).__name__, " ".join(reason.split())
    )
    return stock


def _trial_of(config: Any) -> Texts:
    """Texts of token ids that every vocabulary has; one is longer than the window, unless that is wide."""
    texts = [[3, 4, 5], [6, 3], [5, 7, 3, 8, 4]]
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int) and 0 < window <= _TRIED_WINDOW:
        longest = getattr(config, "max_position_embeddings", window)
        texts.append([3 + place % 7 for place in range(min(2 * window + 8, longest))])
    return texts


@torch.inference_mode()
def _are_alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    largest = float((found - expected).abs().max())
    return largest <= _LIKE.get(expected.dtype, 0.0) * max(1.0, float(expected.abs().max()))


class PackedForward:
    """A forward of one row with all texts, whose layers call `packed_attention`."""

    def __init__(self, model: Any) -> None:
        self._model = model.base_model
        self._takes_types = "token_type_ids" in _parameters(self._model)
        # A mask of four dimensions is used as it is: transformers makes none of its own.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=model.device, dtype=model.dtype)

    @torch.inference_mode()
    def __call__(self, texts: Texts, types: Texts | None) -> Sequence[torch.Tensor]:
        lengths = [len(text) for text in texts]
        given = {} if types is None or not self._takes_types else {"token_type_ids": self._row(types)}
        ids = self._row(texts)
        output = self._model(
            input_ids=ids,
            position_ids=positions_of(self._model, ids, lengths),
            attention_mask=self._no_mask,
            runs=runs_of(lengths),
            **given,
        )
        return divided(output.last_hidden_state[0], lengths)

    def _row(self, texts: Texts) -> torch.Tensor:
        return torch.tensor([[id for text in texts for id in text]], device=self._no_mask.device)


class EqualLengths:
    """A stock forward for each length that the texts have: nothing is padded, so nothing is masked."""

    def __init__(self, model: Any) -> None:
        self._model = model.base_model
        self._takes_types = "token_type_ids" in _parameters(self._model)

    @torch.inference_mode()
    def __call__(self, texts: Texts, types: Texts | None) -> Sequence[torch.Tensor]:
        states: list[torch.Tensor] = []
        for _, group in groupby(range(len(texts)), key=lambda index: len(texts[index])):
            alike = list(group)
            ids = torch.tensor([texts[index] for index in alike], device=self._model.device)
            given = {}
            if types is not None and self._takes_types:
                given["token_type_ids"] = torch.tensor([types[index] for index in alike], device=ids.device)
            output = self._model(input_ids=ids, attention_mask=torch.ones_like(ids), **given)
            states += output.last_hidden_state
        return states


def _parameters(model: Any) -> frozenset[str]:
    """The names of the parameters of a model's forward."""
    return frozenset(signature(model.forward).parameters)
