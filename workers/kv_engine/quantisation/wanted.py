"""The form of a model's weights, and of its keys and values, that the settings ask for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from models.checkpoints.files import UnsupportedArchitectureError


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """The wanted number of bits of a model's weights, and of its keys and values.

    Attributes:
        bits: of weights, 4 or 8; None is as the checkpoint stores them.
        is_float: weights of eight bits are floats (`models.grouped_weights.FLOAT8`), and not integers.
        keeps_stored: keep numbers of few bits as the checkpoint stores them, rather than as floats.
        calibration: token ids of a text; squared errors of weights are weighted by the inputs that it causes.
        measured: token ids of another text, for which the predictions with floats and with few bits are
            compared.
        rounds_cells: keys and values have eight bits.
        kept_beside: the folder of the checkpoint, beside which chosen numbers are kept (`kept_weights`); None
            keeps none.
    """

    bits: int | None = None
    is_float: bool = False
    keeps_stored: bool = True
    calibration: Sequence[int] = ()
    measured: Sequence[int] = ()
    rounds_cells: bool = False
    kept_beside: Path | None = None

    @property
    def numbers(self) -> str:
        """The name of the numbers that weights become, as in `model_kwargs.quantize`; or empty."""
        if self.bits is None:
            return ""
        return f"fp{self.bits}" if self.is_float else f"int{self.bits}"

    @property
    def wanted(self) -> str:
        """The key and the value in `model_kwargs` that nothing but our kernels computes; or empty."""
        if self.numbers:
            return f"quantize is {self.numbers}"
        return "kv_cache is int8" if self.rounds_cells else ""


AS_STORED: Final = Quantisation()


def refuse(quantisation: Quantisation, reason: str) -> None:
    """Raise an error with the reason why no kernel computes what is wanted, if anything is.

    Raises:
        UnsupportedArchitectureError: weights, or keys and values, shall be quantised.
    """
    if quantisation.wanted:
        raise UnsupportedArchitectureError(f"model_kwargs.{quantisation.wanted}, but {reason}: leave it out")
