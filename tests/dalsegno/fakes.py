"""Tiny roles to supervise, and a console that can be waited for."""

import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.serve.role_runs import Command
from dalsegno.terminal.console import Console

OBEDIENT = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("up", flush=True)
signal.sigwait({signal.SIGTERM})
print("told to stop", flush=True)
"""
DEAF = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
"""
REFUSING = """
import sys
print("model 'x' is unknown", file=sys.stderr)
sys.exit(78)
"""
HEALTHY_GATEWAY = """
import http.server, signal, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health/ready" else 404)
        self.end_headers()
        self.wfile.write(b"{}")
    def log_message(self, *_): pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


def command(name: str, script: str, *args: str) -> Command:
    """A role that is a few lines of Python."""
    return Command(name=name, program=(sys.executable, "-I", "-c"), args=(script, *args), env={})


@dataclass(slots=True)
class Heard(Console):
    """A console whose lines a test can wait for: `(who, line)`."""

    lines: asyncio.Queue[tuple[str, str]] = field(default_factory=asyncio.Queue)

    def role(self, name: str, line: bytes) -> None:
        self.lines.put_nowait((name, line.decode(errors="replace")))

    def say(self, line: str, level: str = "info") -> None:
        self.lines.put_nowait(("dalsegno", line))

    async def until(self, part: str) -> tuple[str, str]:
        """The next line that holds `part`; those before it are dropped."""
        while True:
            who, line = await self.lines.get()
            if part in line:
                return who, line


async def gone(*pids: int) -> None:
    """Wait until none of these processes runs; their end sets no event of this process."""
    async with asyncio.timeout(30):
        while any(runs(pid) for pid in pids):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def runs(pid: int) -> bool:
    """True if a process runs; a zombie does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
