"""The settings of a Dia checkpoint: special codes, delays, limits, and how it speaks. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from models.checkpoints.files import CheckpointError, read_json, read_json_if_present

_DELAYS: Final = (0, 8, 9, 10, 11, 12, 13, 14, 15)
_SPECIAL: Final = {"bos_token_id": 1026, "eos_token_id": 1024, "pad_token_id": 1025}


@dataclass(frozen=True, slots=True, kw_only=True)
class DiaSettings:
    """What `config.json` and `generation_config.json` say; where they say nothing, transformers' defaults.

    Attributes:
        delays: of each code of a frame, in steps; the first has none.
        bos, eos, pad: the codes that begin and end speech, and stand behind its end.
        text: the most bytes of a text.
        max_length: the most steps of an answer, without the delays.
        numbers: in the keys and values of a cell, of all layers.
        stored: the dtype of the weights.
        temperature, top_p, top_k, guidance_scale: 0 is greedy; 1, all and 1 are off.
    """

    delays: tuple[int, ...]
    bos: int
    eos: int
    pad: int
    text: int
    max_length: int
    numbers: int
    stored: str
    temperature: float
    top_p: float
    top_k: int
    guidance_scale: float

    @property
    def longest_delay(self) -> int:
        return max(self.delays)

    @property
    def longest(self) -> int:
        """The longest sequence in cells: a text, and the steps of an answer."""
        return self.text + self.max_length + self.longest_delay

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Read the settings of a folder.

        Raises:
            CheckpointError: a file is missing or malformed, or a value is not one that Dia can have.
        """
        path = checkpoint / "config.json"
        config, generation = read_json(path), read_json_if_present(checkpoint / "generation_config.json")
        encoder, decoder = config.get("encoder_config") or {}, config.get("decoder_config") or {}

        def special(name: str) -> Any:
            return config.get(name) or decoder.get(name) or _SPECIAL[name]

        delays = config.get("delay_pattern") or _DELAYS
        if (
            not isinstance(delays, list | tuple)
            or delays[0]
            or any(not isinstance(one, int) for one in delays)
        ):
            raise CheckpointError(f"{path}: expected a delay_pattern of integers from 0, found {delays!r}")
        length = generation.get("max_length") or decoder.get("max_position_embeddings", 3072)
        layers, heads = decoder.get("num_hidden_layers", 18), decoder.get("cross_num_key_value_heads", 16)
        dim = decoder.get("cross_head_dim", 128)
        is_greedy = generation.get("do_sample") is not True
        temperature = generation.get("temperature") or 1.0
        return cls(
            delays=tuple(delays),
            bos=special("bos_token_id"),
            eos=special("eos_token_id"),
            pad=special("pad_token_id"),
            text=encoder.get("max_position_embeddings", 1024),
            max_length=length,
            numbers=2 * layers * heads * dim,
            stored=str(config.get("dtype") or config.get("torch_dtype")),
            temperature=0.0 if is_greedy else temperature,
            top_p=generation.get("top_p") or 1.0,
            top_k=generation.get("top_k") or 0,
            guidance_scale=generation.get("guidance_scale") or 1.0,
        )
