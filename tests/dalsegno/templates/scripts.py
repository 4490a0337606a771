"""A template whose processes run Python scripts: an order's first argument is the script.

The template's own arguments are its control socket and a script that it runs as its imports.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dalsegno.templates import forking
from dalsegno.templates.template import Template, work


@contextmanager
def template(imports: str = "") -> Iterator[Template]:
    """A template that this process has started as a program, for it may have threads itself."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.dalsegno.templates.scripts", str(theirs.fileno()), imports],
            pass_fds=[theirs.fileno()],
            cwd=Path(__file__).parents[3],
            process_group=0,
        )
    with ours, process:
        yield Template(process.pid, ours)
        ours.close()


if __name__ == "__main__":
    order = work(socket.socket(fileno=int(sys.argv[1])), lambda: exec(sys.argv[2], {}))
    sys.argv = ["-c", *order.args[1:]]
    forking.call_and_end(lambda: exec(order.args[0], {"__name__": "__main__"}))
