"""The nodes of language models that hear: the states of an encoder stand in the prompt, and the text follows.

encoder   what the processing makes of a window -> states (rows, hidden), in the width of the language model
decoder   states -> the tokens of a window (`models.speech_to_text.window_program.WriteAfterPrompt`)
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from models.base import Item, StatelessResult
from models.checkpoints.progress import Progress
from models.programs import Program
from models.speech_to_text.frames_decoder import NAME
from models.speech_to_text.window_program import WriteAfterPrompt
from models.speech_to_text.windows import HEARD, PROGRAM_NAME
from models.vision_language.decoder import VlmDecoder, load_decoder
from models.vision_language.tower import load_tower


class HearingDecoder(VlmDecoder):
    """The language model. It has one program, and no token loop of its own.

    Attributes:
        programs: by name.
    """

    programs: Mapping[str, Program] = MappingProxyType({})


class SoundEncoder:
    """The encoder and its projector as a stateless node (`models.base.StatelessNode`).

    Windows are computed one by one: padding to the longest of a batch would change their last bits.
    """

    max_batch: Final = 1

    def __init__(self, model: Any) -> None:
        self.model: Final = model

    @torch.inference_mode()
    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Encode what each item heard to `states`, (rows, hidden)."""
        return [
            StatelessResult(
                outputs={"states": self.encode(item.inputs[HEARD].to(self.model.device, self.model.dtype))}
            )
            for item in items
        ]

    def encode(self, heard: torch.Tensor) -> torch.Tensor:
        """The rows of a window, (rows, hidden), of what the processing made of it."""
        raise NotImplementedError


def load_hearing(
    checkpoint: Path,
    node: str,
    encoder: type[SoundEncoder],
    *,
    family: str,
    place: int,
    ends: Collection[int],
    device: str | torch.device,
    dtype: str,
    progress: Progress,
) -> HearingDecoder | SoundEncoder:
    """Load `encoder` or `decoder` of a checkpoint folder in Hugging Face format.

    Args:
        checkpoint: the folder.
        node: any other name than `decoder` is the encoder.
        encoder: of the family.
        family: its name.
        place: the token in the prompt that the states replace.
        ends: the tokens that end a text.
        device: of the weights.
        dtype: as configured.
        progress: is told the bytes that were read.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
        UnsupportedArchitectureError: the language model cannot be served over a paged pool.
    """
    if node != NAME:
        return encoder(load_tower(checkpoint, device=device, dtype=dtype, progress=progress))
    decoder = load_decoder(
        checkpoint, NAME, device=device, dtype=dtype, progress=progress, node_class=HearingDecoder
    )
    assert isinstance(decoder, HearingDecoder)
    decoder.programs = {PROGRAM_NAME: WriteAfterPrompt(family, ends, place)}
    return decoder
