"""Exit statuses of `dalsegno` and of its role processes, as in sysexits.h."""

from typing import Final

EX_UNAVAILABLE: Final = 1
"""A dependency is missing now and may return: the log cannot be reached, the port is taken."""
EX_SOFTWARE: Final = 70
"""A bug; the traceback shows where."""
EX_CONFIG: Final = 78
"""The configuration can never run. The supervisor does not restart such a role."""
EX_INTERRUPTED: Final = 130
"""Interrupted by Ctrl-C, or by a second signal to stop."""
