"""Another process's arena, mapped to be read and nothing else.

Views are of the owner's memory, without a copy, and the owner is not told: it frees when it pleases. So a
view is good only if its slot's generation still stands after it was read (`check`).
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
    """An arena file that is open as `fd`, which belongs to the reader from here on.

    Raises:
        TensorGone: it is not the arena of that epoch.
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
        # With the last reference, and not before: another thread may be in `check`.
        weakref.finalize(self, os.close, fd).atexit = False

    def view(self, locator: Locator) -> Bytes:
        """The bytes of a slot, not to be written.

        Raises:
            TensorGone: there is no such slot (any more).
        """
        self.check(locator)
        return self._bytes[locator.offset : locator.offset + locator.nbytes]

    def check(self, locator: Locator) -> None:
        """Whether the slot is still that tensor's.

        Raises:
            TensorGone: it is not, or never was.
        """
        if locator.segment != SEGMENT or not self._layout.begins_tensor(locator.offset):
            raise TensorGone(f"there is no slot at {locator.offset} of segment {locator.segment}")
        # Read by a call of the system: it orders the read behind those of the bytes, on any processor, and a
        # word that was never written takes no memory to look at.
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
