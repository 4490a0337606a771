"""The process that decodes media: `python -m workers.media.decoder_process SOCKET MEMORY_BYTES`.

It serves one job at a time, from a socket that it inherits. It holds no credentials, opens no file but the
one that comes with a job, and has limits: memory beyond what it needs idle, processor time and wall time per
job, no files written, no core dumps. A file that takes it over or ends it harms no other process. It ends
when its worker does, because the socket is closed then.

Imports numpy, pillow and PyAV, and nothing of the worker but `workers.media.wire`.
"""

import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from PIL import AvifImagePlugin, Image

from models.media.arrays import read_arrays
from models.media.audio import audio_blocks
from models.media.audio_spans import audio_span
from models.media.images import decode_image
from models.media.kinds import MediaError, MediaLimits
from models.media.videos import open_video
from workers.media import wire

_NICENESS: Final = 5
_SPARE_S: Final = 2
"""The worker's own time limit comes first; these end a process whose worker cannot."""


def main() -> None:
    """Serve jobs until the socket is closed."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    _confine(int(sys.argv[2]))
    wire.send(sock, {"ready": True})
    while True:
        try:
            job, file = wire.receive_with_file(sock)
        except (wire.ClosedError, OSError):
            return
        with os.fdopen(file, "rb") as opened:
            _serve(sock, job, opened)


def _confine(memory_bytes: int) -> None:
    """Limit the process, once everything is imported."""
    os.nice(_NICENESS)
    Image.preinit()
    Image.init()
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    idle_bytes = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    most = idle_bytes + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))


def _serve(sock: socket.socket, job: dict[str, Any], file: BinaryIO) -> None:
    """Decode one file. After a lack of memory the process ends: its heap may be in pieces."""
    _limit_time(float(job["timeout_s"]))
    try:
        _decode(sock, job, file)
    except MediaError as error:
        wire.send(sock, {"error": error.code, "message": error.message[:1000]})
    except MemoryError:
        wire.send(sock, {"error": "memory", "message": ""})
        sys.exit(1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _limit_time(timeout_s: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = math.ceil(used.ru_utime + used.ru_stime + timeout_s) + _SPARE_S
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_REAL, timeout_s + _SPARE_S)  # SIGALRM ends the process


def _decode(sock: socket.socket, job: dict[str, Any], file: BinaryIO) -> None:
    limits = MediaLimits(**job["limits"])
    file.seek(0)  # the position is shared with decoders that died at this job before
    match job["kind"]:
        case "image":
            _send_arrays(sock, [("", decode_image(file, limits))])
        case "tensors":
            _send_arrays(sock, read_arrays(file, limits).items())
        case "audio":
            _send_arrays(sock, (("", block) for block in audio_blocks(file, job["rate"], limits)))
        case "audio_span":
            span = audio_span(file, job["rate"], job["first"], job["count"], limits)
            _send_arrays(sock, [("", span)])
        case "video":
            _send_video(sock, file, limits)
        case _:
            raise ValueError(f"expected a kind of media, found {job['kind']!r}")


def _send_arrays(sock: socket.socket, arrays: Iterable[tuple[str, np.ndarray[Any, Any]]]) -> None:
    for name, array in arrays:
        _send_array(sock, {"name": name}, array)
    wire.send(sock, {"end": True})


def _send_array(sock: socket.socket, fields: dict[str, Any], array: np.ndarray[Any, Any]) -> None:
    plain = np.ascontiguousarray(array)
    wire.send(sock, fields | {"dtype": plain.dtype.str, "shape": list(array.shape)})
    sock.sendall(plain.reshape(-1).view(np.uint8).data)


def _send_video(sock: socket.socket, file: BinaryIO, limits: MediaLimits) -> None:
    """Send what the file says; then the frames that the worker chooses, until it chooses none."""
    with open_video(file, limits) as source:
        info = source.info
        wire.send(
            sock, {name: getattr(info, name) for name in ("frames", "fps", "seconds", "width", "height")}
        )
        while indices := wire.receive(sock)["indices"]:
            for seconds, frame in source.frames(indices):
                _send_array(sock, {"seconds": seconds}, frame)
            wire.send(sock, {"end": True, "seen": source.seen})


if __name__ == "__main__":
    main()
