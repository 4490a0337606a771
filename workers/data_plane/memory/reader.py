"""A read-only mapping of another process's arena.

Views show the owner's memory, without a copy. The owner does not know of them and frees slots at any time. So
a view was valid only if its slot's generation is still there after reading (`check`).
"""

import mmap
import os
import stat
import weakref

import numpy as np

from shared.errors import TensorGone
from workers.data_plane.memory.layout import HEADER_BYTES, PAIR, PAIR_BYTES, Layout, LayoutError
from workers.data_plane.port import Bytes
from workers.data_plane.transport import SEGMENT, Locator


class ArenaReader:
    """A mapped arena file; the reader owns its descriptor `fd`.

    Raises:
        TensorGone: the file is not the arena of that epoch.
        OSError: it cannot be mapped.
    """

    def __init__(self, fd: int, epoch: int) -> None:
        self._fd = fd
        try:
            self._layout = _layout(fd, epoch)
            memory = mmap.mmap(fd, self._layout.length, prot=mmap.PROT_READ)
        except BaseException:
            os.close(fd)
            raise
        self._bytes = np.frombuffer(memory, np.uint8)
        # Closed with the last reference, because another thread may be in `check`.
        weakref.finalize(self, os.close, fd).atexit = False

    def view(self, locator: Locator) -> Bytes:
        """Return the bytes of a slot, read-only.

        Raises:
            TensorGone: the slot was freed, or never existed.
        """
        self.check(locator)
        return self._bytes[locator.offset : locator.offset + locator.nbytes]

    def check(self, locator: Locator) -> None:
        """Check that the slot is still that tensor's.

        Raises:
            TensorGone: the slot was freed, or never existed.
        """
        if locator.segment != SEGMENT or not self._layout.begins_tensor(locator.offset):
            raise TensorGone(f"there is no slot at {locator.offset} of segment {locator.segment}")
        # A system call orders this read after those of the bytes, on any processor; and reading an unwritten
        # word takes no memory.
        pair = os.pread(self._fd, PAIR_BYTES, self._layout.pair_at(locator.offset))
        generation, nbytes = PAIR.unpack(pair)
        if generation != locator.generation or not locator.generation:
            raise TensorGone(f"slot {locator.generation} at {locator.offset} was freed, or never was")
        if nbytes != locator.nbytes or locator.offset + nbytes > self._layout.length:
            raise TensorGone(f"slot {locator.generation} has {nbytes} bytes, not {locator.nbytes}")


def _layout(fd: int, epoch: int) -> Layout:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise TensorGone("what stands in the arena's place is no file")
    try:
        layout = Layout.read(os.pread(fd, HEADER_BYTES, 0), found.st_size)
    except LayoutError as error:
        raise TensorGone(f"what stands in the arena's place is none: {error}") from error
    if layout.epoch != epoch:
        raise TensorGone("another arena stands in the place of the one that is meant")
    return layout
