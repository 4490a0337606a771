"""Orpheus: the torch face.

    LLM            a Llama, as any other (see `models.transformers_lm`)
    snac_decoder   windows of audio tokens -> 16-bit samples (see `models.orpheus.snac`)

What `snac_decoder` gives is a part of what clients get, and is compared byte for byte when a worker's
successor does it again. So a window gives the same samples whoever's windows are beside it, and on whatever
rank it is decoded: its noise is keyed by the request's seed and the chunk's number, and every forward over
so many frames is of one shape. Convolutions over different batches, or cut over more threads, differ in
their last bits, and of 8192 samples of 16 bits some twenty show it.
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
from models.orpheus.snac import Snac, find_snac, load_snac
from shared.errors import BugError

if TYPE_CHECKING:
    from models.transformers_lm.node import DecoderLM

LLM: Final = "LLM"
SNAC: Final = "snac_decoder"

GPU_ROWS: Final = 16
"""How many windows a forward on a GPU is of, filled up where fewer wait. On a CPU, where many together are
no faster than one by one, it is one."""


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
    """One node of a checkpoint: a folder in Hugging Face format, with SNAC's in it or elsewhere.

    Args:
        checkpoint: the language model's folder.
        node: `LLM` or `snac_decoder`.
        device: where the weights go.
        dtype: of the language model (see `load_decoder`). SNAC is small, and computes in float32.
        progress: told about every tensor of the language model that is read.
        kwargs: `snac`, the folder of the SNAC checkpoint (see `find_snac`).
        peers: who shares the language model, where several do (see `load_decoder`).

    Raises:
        CheckpointError: something in a folder is missing, damaged or unsupported.
    """
    if node == LLM:
        # A rank that only makes sound is ready in half the time without transformers.
        from models.transformers_lm.loader import load_decoder  # noqa: PLC0415

        return load_decoder(checkpoint, LLM, device=device, dtype=dtype, progress=progress, peers=peers)
    if node != SNAC:
        raise BugError(f"orpheus has no node {node!r} with weights; it has {LLM!r} and {SNAC!r}")
    on = torch.device(device)
    snac = load_snac(find_snac(checkpoint, kwargs.get("snac")), on)
    return SnacDecoder(snac, rows=GPU_ROWS if on.type == "cuda" else 1)


def examine(checkpoint: Path, node: str, *, members: int = 1) -> int:
    """What `load` would refuse of the language model before it reads a weight (see `examine_decoder`).

    Raises:
        CheckpointError, UnsupportedArchitectureError: as `load` does.
    """
    from models.transformers_lm.loader import examine_decoder  # noqa: PLC0415 - as in `load`

    return examine_decoder(checkpoint, members=members)


class SnacDecoder:
    """SNAC as a stateless node (`models.base.StatelessNode`).

    Attributes:
        max_batch: how many windows each forward is of.
    """

    def __init__(self, snac: Snac, *, rows: int) -> None:
        self.max_batch: Final = rows
        self._snac = snac

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Each item's chunk of audio tokens, `token` (n,), to `audio` (samples,) int16, on the CPU."""
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
        """The samples of windows of so many frames: (windows, samples) int16, on the CPU."""
        if not frames:
            return torch.zeros(len(windows), 0, dtype=torch.int16)
        if self._snac.device.type == "cpu" and torch.get_num_threads() != 1:
            torch.set_num_threads(1)  # this thread's alone
        codes = torch.zeros(self.max_batch, frames, FRAME_TOKENS, dtype=torch.int64)
        codes[: len(windows)] = torch.stack(list(windows))
        sounds = self._snac.decode(codes, seeds)[: len(windows)]
        return (sounds.clamp(-1, 1) * 32767).to(torch.int16).cpu()


def codes_of(tokens: torch.Tensor) -> torch.Tensor:
    """The codes (frames, 7) of audio tokens (n,); those of a frame that is not whole are dropped.

    Raises:
        BugError: there is a token that is no audio token.
    """
    wrong = tokens[(tokens < FIRST_AUDIO) | (tokens >= END_AUDIO)]
    if len(wrong):
        raise BugError(f"expected audio tokens, from {FIRST_AUDIO} to {END_AUDIO - 1}, found {int(wrong[0])}")
    frames = len(tokens) // FRAME_TOKENS
    whole = tokens[: frames * FRAME_TOKENS].to(torch.int64)
    return ((whole - FIRST_AUDIO) % CODES).view(frames, FRAME_TOKENS)


def noise_seed(seed: int, number: int) -> int:
    """What the noise of a request's chunk is drawn with: 64 bits."""
    digest = hashlib.blake2b(f"{seed}/{SNAC}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _seed_of(item: Item) -> int:
    return noise_seed(item.seed, _chunk_of(item).number)


def _chunk_of(item: Item) -> ChunkOf:
    if item.chunk is None:
        raise BugError(f"{SNAC} takes chunks of a stream, and this firing has none")
    return item.chunk
