"""The torch nodes of Orpheus.

    LLM            a Llama (see `models.transformers_lm`)
    snac_decoder   windows of audio tokens -> 16-bit samples (see `models.orpheus.snac`)

The output of `snac_decoder` goes to clients, and is compared byte for byte when another worker repeats it. So
the samples of a window must not depend on the other windows of the batch, nor on the rank: the noise is
derived from the request's seed and the chunk's number, and all forwards over the same number of frames have
one shape. Convolutions over other batch sizes, or with more threads, differ in their last bits: in about
twenty of 8192 16-bit samples.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch

from models.base import ChunkOf, Item, Peers, StatelessResult
from models.checkpoints.progress import Progress, silent
from models.orpheus.frames import CODES, END_AUDIO, FIRST_AUDIO, FRAME_TOKENS, samples_of
from models.orpheus.snac import Snac, load_snac
from models.orpheus.weight_files import SNAC, find_snac
from shared.errors import BugError

if TYPE_CHECKING:
    from models.transformers_lm.node import DecoderLM

LLM: Final = "LLM"

GPU_ROWS: Final = 16
"""The batch size of every forward on a GPU; smaller batches are padded. On a CPU it is one, because batching
is not faster there."""


def load(
    checkpoint: Path,
    node: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    peers: Peers | None = None,
) -> "DecoderLM | SnacDecoder":
    """Load one node of a checkpoint folder in Hugging Face format; SNAC's folder may be in it or elsewhere.

    `node` is `LLM`, whose arguments are those of `load_decoder`, or `snac_decoder`. SNAC is small, and
    computes in float32; `kwargs["snac"]` is the folder of its checkpoint (see `find_snac`).

    Raises:
        CheckpointError: a file of a folder is missing, damaged or unsupported.
    """
    if node == LLM:
        # Without transformers, a rank that only decodes audio starts in half the time.
        from models.transformers_lm.loader import load_decoder  # noqa: PLC0415

        return load_decoder(checkpoint, LLM, device=device, dtype=dtype, progress=progress, peers=peers)
    if node != SNAC:
        raise BugError(f"orpheus has no node {node!r} with weights; it has {LLM!r} and {SNAC!r}")
    on = torch.device(device)
    snac = load_snac(find_snac(checkpoint, kwargs.get("snac")), on)
    return SnacDecoder(snac, rows=GPU_ROWS if on.type == "cuda" else 1)


def examine(checkpoint: Path, node: str, *, members: int = 1) -> int:
    """Raise what `load` would raise before it reads a weight; return the language model's longest sequence.

    Raises:
        CheckpointError, UnsupportedArchitectureError: as `load` does.
    """
    from models.transformers_lm.loader import examine_decoder  # noqa: PLC0415 - as in `load`

    return examine_decoder(checkpoint, members=members)


class SnacDecoder:
    """SNAC as a stateless node (`models.base.StatelessNode`).

    Attributes:
        max_batch: the number of windows of each forward.
    """

    def __init__(self, snac: Snac, *, rows: int) -> None:
        self.max_batch: Final = rows
        self._snac = snac

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Decode each item's chunk of audio tokens, `token` (n,), to `audio`, (samples,) int16 on the CPU."""
        results: dict[int, StatelessResult | Exception] = {}
        waiting: dict[int, list[tuple[int, torch.Tensor]]] = {}  # by the number of frames
        for place, item in enumerate(items):
            try:
                codes = codes_of(item.inputs["token"].cpu())
            except BugError as error:
                results[place] = error
            else:
                waiting.setdefault(len(codes), []).append((place, codes))
        for frames, group in waiting.items():
            for begin in range(0, len(group), self.max_batch):
                places, windows = zip(*group[begin : begin + self.max_batch], strict=True)
                sounds = self._decode(frames, windows, [_seed_of(items[place]) for place in places])
                for place, sound in zip(places, sounds, strict=True):
                    kept = sound[samples_of(_chunk_of(items[place]), frames)].clone()
                    results[place] = StatelessResult(outputs={"audio": kept})
        return [results[place] for place in range(len(items))]

    def _decode(self, frames: int, windows: Sequence[torch.Tensor], seeds: Sequence[int]) -> torch.Tensor:
        """The samples of windows with that number of frames: (windows, samples) int16 on the CPU."""
        if not frames:
            return torch.zeros(len(windows), 0, dtype=torch.int16)
        if self._snac.device.type == "cpu" and torch.get_num_threads() != 1:
            torch.set_num_threads(1)  # for this thread only
        codes = torch.zeros(self.max_batch, frames, FRAME_TOKENS, dtype=torch.int64)
        codes[: len(windows)] = torch.stack(list(windows))
        sounds = self._snac.decode(codes, seeds)[: len(windows)]
        return (sounds.clamp(-1, 1) * 32767).to(torch.int16).cpu()


def codes_of(tokens: torch.Tensor) -> torch.Tensor:
    """The codes, (frames, 7), of audio tokens, (n,); tokens of an incomplete frame are dropped.

    Raises:
        BugError: a token is not an audio token.
    """
    wrong = tokens[(tokens < FIRST_AUDIO) | (tokens >= END_AUDIO)]
    if len(wrong):
        raise BugError(f"expected audio tokens, from {FIRST_AUDIO} to {END_AUDIO - 1}, found {int(wrong[0])}")
    frames = len(tokens) // FRAME_TOKENS
    whole = tokens[: frames * FRAME_TOKENS].to(torch.int64)
    return ((whole - FIRST_AUDIO) % CODES).view(frames, FRAME_TOKENS)


def noise_seed(seed: int, number: int) -> int:
    """The seed of the noise of a request's chunk: 64 bits."""
    digest = hashlib.blake2b(f"{seed}/{SNAC}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _seed_of(item: Item) -> int:
    return noise_seed(item.seed, _chunk_of(item).number)


def _chunk_of(item: Item) -> ChunkOf:
    if item.chunk is None:
        raise BugError(f"{SNAC} takes chunks of a stream: expected a chunk in the item, found none")
    return item.chunk
