"""The private nats-server as a supervised child.

`shared.log.nats.private_server.NatsServer` is synchronous, and on Linux its process ends with the thread that
started it. So one thread, which lives as long as this object is open, starts and ends it. Another thread
waits
for its end: polling took more CPU than everything else the launcher does.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from shared.log.nats.private_server import NatsServer


@dataclass(slots=True)
class PrivateNats:
    """A nats-server under supervision (a `dalsegno.serve.supervisor.Child`)."""

    server: NatsServer
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=1, thread_name_prefix="nats-server")
    )

    @property
    def name(self) -> str:
        return "nats"

    @property
    def pid(self) -> int | None:
        return self.server.pid

    @property
    def last_line(self) -> str:
        return f"see {self.server.log_file}"

    async def start(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self.server.start)

    async def wait(self) -> int:
        try:
            return await asyncio.to_thread(self.server.wait)
        except asyncio.CancelledError:
            self.kill()
            raise

    def terminate(self) -> None:
        self._thread.submit(self.server.stop)

    def kill(self, reason: str = "") -> None:
        self._thread.submit(self.server.kill)

    def close(self) -> None:
        """End the server, if it runs, and the thread."""
        self._thread.submit(self.server.stop)
        self._thread.shutdown()
