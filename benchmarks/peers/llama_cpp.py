"""The peer for llama.cpp: llama-cpp-python's low-level batch API, scheduled as in llama.cpp's server.

llama-cpp-python's server answers one request at a time. This script batches as llama.cpp's own server does:
each batch has the next token of every running answer, and prompt tokens up to its limit.
"""

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.peers.forms import path_of
from benchmarks.peers.protocol import Answer, Ready, asked_weights, drive

_ROWS = 32
_ROW_TOKENS = 512
_BATCH = 2048
_MICRO_BATCH = 512


@dataclass(slots=True)
class _Row:
    """One request: the rest of its prompt and its position."""

    number: int
    prompt: list[int]
    position: int = 0
    answer: Answer = field(default_factory=Answer)


class Model:
    """A file that llama.cpp has loaded."""

    def __init__(self, path: Path) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load {path}; its output is on stderr")
        threads = os.cpu_count() or 1
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = _ROWS * _ROW_TOKENS
        params.n_seq_max = _ROWS
        params.n_batch, params.n_ubatch = _BATCH, _MICRO_BATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp could not make a context; its output is on stderr")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)

    def logits(self, ids: list[int]) -> Any:
        """Return the logits of a text, (T, vocabulary) float32, whose tokens are computed in one batch."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._batch.n_tokens = 0
        row = _Row(0, ids)
        for token in ids:
            self._add(token, row, sampled=True)
        if status := llama_cpp.llama_decode(self._context, self._batch):
            raise RuntimeError(f"expected llama_decode to return 0, found {status}")
        return np.stack([self._scores(at).copy() for at in range(len(ids))])

    def _scores(self, at: int) -> Any:
        """The logits at a place of the last batch; they are valid until the next one."""
        logits = llama_cpp.llama_get_logits_ith(self._context, at)
        return np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self._vocabulary,))

    def ask(self, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        begun_s = time.perf_counter()
        rows = [_Row(number, ids) for number, ids in enumerate(prompts)]
        while left := [row for row in rows if len(row.answer.ids) < max_tokens]:
            sampled = self._fill(left)
            if status := llama_cpp.llama_decode(self._context, self._batch):
                raise RuntimeError(f"expected llama_decode to return 0, found {status}")
            for at, row in sampled:
                row.answer.ids.append(int(self._scores(at).argmax()))
            now_s = time.perf_counter() - begun_s
            for _, row in sampled:
                row.answer.arrivals.append(now_s)
        return [row.answer for row in rows]

    def _fill(self, rows: list[_Row]) -> list[tuple[int, _Row]]:
        """Make the next batch; return the positions whose logits are sampled, with their requests."""
        self._batch.n_tokens = 0
        decoding = [row for row in rows if row.answer.ids]
        sampled = [(self._add(row.answer.ids[-1], row, sampled=True), row) for row in decoding]
        for row in (row for row in rows if not row.answer.ids):
            room = _BATCH - self._batch.n_tokens
            for token in row.prompt[row.position : row.position + room]:
                at = self._add(token, row, sampled=row.position + 1 == len(row.prompt))
                if row.position == len(row.prompt):
                    sampled.append((at, row))
        return sampled

    def _add(self, token: int, row: _Row, *, sampled: bool) -> int:
        at = self._batch.n_tokens
        self._batch.token[at] = token
        self._batch.pos[at] = row.position
        self._batch.n_seq_id[at] = 1
        self._batch.seq_id[at][0] = row.number
        self._batch.logits[at] = sampled
        self._batch.n_tokens += 1
        row.position += 1
        return int(at)


@contextmanager
def _loaded(checkpoint: Path) -> Iterator[Ready]:
    path = path_of(checkpoint, asked_weights())
    model = Model(path)
    said = llama_cpp.llama_print_system_info().decode()
    command = f"llama_decode of {path.name}, n_batch {_BATCH}, n_ubatch {_MICRO_BATCH}; {said}"
    yield Ready(model.ask, command, ("llama-cpp-python",))


if __name__ == "__main__":
    drive(_loaded)
