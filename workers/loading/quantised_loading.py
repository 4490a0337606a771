"""The quantisation that the settings ask for, with the texts that it is calibrated and measured by."""

import logging
from pathlib import Path
from typing import Final

from configs.deployment import ConfigError, DeploymentConfig
from models.checkpoints.files import CheckpointError
from models.text.tokenizer import load_tokenizer
from workers.kv_engine.quantisation.wanted import Quantisation
from workers.settings import EngineSettings

_LOGGER: Final = logging.getLogger(__name__)
_BITS: Final = {"int4": 4, "int8": 8, "fp8": 8}
_MOST_CALIBRATION_TOKENS: Final = 2048
_MOST_MEASURED_TOKENS: Final = 384

_MEASURED_TEXT: Final = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: \
once or twice she had peeped into the book her sister was reading, but it had no pictures or \
conversations in it, "and what is the use of a book," thought Alice "without pictures or conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy \
and stupid), whether the pleasure of making a daisy-chain would be worth the trouble of getting up and \
picking the daisies, when suddenly a White Rabbit with pink eyes ran close by her.

There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear \
the Rabbit say to itself, "Oh dear! Oh dear! I shall be late!" (when she thought it over afterwards, it \
occurred to her that she ought to have wondered at this, but at the time it all seemed quite natural); \
but when the Rabbit actually took a watch out of its waistcoat-pocket, and looked at it, and then \
hurried on, Alice started to her feet, for it flashed across her mind that she had never before seen a \
rabbit with either a waistcoat-pocket, or a watch to take out of it, and burning with curiosity, she ran \
across the field after it, and fortunately was just in time to see it pop down a large rabbit-hole under \
the hedge.
"""
"""The beginning of Alice's Adventures in Wonderland (Lewis Carroll 1865)."""


def quantisation_of(config: DeploymentConfig | None, settings: EngineSettings) -> Quantisation:
    """Return the quantisation of the model in the configuration's checkpoint; without one, none is chosen.

    Raises:
        ConfigError: the calibration text cannot be read.
    """
    bits, rounds_cells = _BITS.get(settings.quantize), settings.kv_cache == "int8"
    if config is None or (bits is None and not rounds_cells):
        return Quantisation(keeps_stored=settings.quantize != "none")
    calibration: list[int] = []
    if settings.calibration_text is not None:
        calibration = _ids(config, _text_of(Path(settings.calibration_text)), _MOST_CALIBRATION_TOKENS)
        if not calibration:
            raise ConfigError(
                f"model_kwargs.calibration_text: {settings.calibration_text} has no tokens of the "
                "checkpoint's tokenizer: expected some hundred words, and a checkpoint with a tokenizer"
            )
    return Quantisation(
        bits=bits,
        is_float=settings.quantize == "fp8",
        keeps_stored=settings.quantize != "none",
        calibration=calibration,
        measured=_ids(config, _MEASURED_TEXT, _MOST_MEASURED_TOKENS),
        rounds_cells=rounds_cells,
        kept_beside=Path(config.checkpoint) if settings.keeps_quantised else None,
    )


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model_kwargs.calibration_text: {path} cannot be read: {error}; expected a text in UTF-8"
        ) from error


def _ids(config: DeploymentConfig, text: str, most: int) -> list[int]:
    """The first token ids of a text; none without a tokenizer."""
    try:
        tokenizer, _ = load_tokenizer(Path(config.checkpoint))
    except CheckpointError as error:
        _LOGGER.info("the error of quantised weights is not measured: %s", error)
        return []
    ids: list[int] = tokenizer.encode(text).ids[: min(most, config.max_seq_len)]
    return ids
