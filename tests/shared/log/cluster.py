"""A real cluster of three nats-servers on loopback, for tests of replicas.

A test module shares one. Each server can be killed,
stopped and started again; its clients find it again at its port.
"""

import asyncio
import itertools
import json
import random
import secrets
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import nats

from shared.log.nats.credentials import Credentials
from shared.log.nats.private_server import nats_server_binary

HOST: Final = "127.0.0.1"
START_S: Final = 30.0
TRIES: Final = 3


class Member:
    """One server of a cluster."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        token: str,
        ports: dict[str, int],
        routes: list[int],
        advertises: bool,
        syncs: bool,
    ) -> None:
        self.name = name
        self.port, self.monitor_port = ports["client"], ports["monitor"]
        self._config = folder / f"{name}.conf"
        self._config.write_text(
            f"""
            server_name: {name}
            listen: "{HOST}:{self.port}"
            http: "{HOST}:{self.monitor_port}"
            authorization {{ token: "{token}" }}
            max_payload: 1MB
            jetstream {{
                store_dir: "{folder / name}"
                max_file_store: 1GB
                sync_interval: {"always" if syncs else "2m"}
            }}
            cluster {{
                name: test
                no_advertise: {str(not advertises).lower()}
                listen: "{HOST}:{ports["route"]}"
                routes: {json.dumps([f"nats://{HOST}:{port}" for port in routes])}
            }}
            """
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://{HOST}:{self.port}"

    @property
    def monitor(self) -> str:
        return f"http://{HOST}:{self.monitor_port}"

    def start(self) -> None:
        if self._process is None:
            command = [str(nats_server_binary()), "--config", str(self._config)]
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        """Kill the server, as in a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def hang(self) -> None:
        """Stop the process (SIGSTOP): it answers nothing, and its connections stay open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def tells(self, page: str) -> dict[str, Any]:
        """Return a page of the server's monitoring."""
        with urllib.request.urlopen(f"{self.monitor}/{page}", timeout=2) as answer:
            told: dict[str, Any] = json.loads(answer.read())
        return told


class Cluster:
    """Three servers. Servers that do not advertise announce only themselves to clients."""

    def __init__(self, folder: Path, *, advertises: bool, syncs: bool) -> None:
        self.credentials = Credentials(token=secrets.token_hex(8))
        assert self.credentials.token is not None
        names = ["one", "two", "three"]
        ports = [dict(zip(("client", "route", "monitor"), _free_ports(3), strict=True)) for _ in names]
        routes = [port["route"] for port in ports]
        self.members = [
            Member(
                name,
                folder,
                token=self.credentials.token,
                ports=of_one,
                routes=routes,
                advertises=advertises,
                syncs=syncs,
            )
            for name, of_one in zip(names, ports, strict=True)
        ]

    @property
    def url(self) -> str:
        return ",".join(member.url for member in self.members)

    @property
    def monitors(self) -> list[str]:
        return [member.monitor for member in self.members]

    def member(self, name: str) -> Member:
        return next(member for member in self.members if member.name == name)

    def start(self) -> None:
        """Start all servers, and poll until each is ready and they have a leader."""
        deadline = time.monotonic() + START_S
        for member in self.members:
            member.start()
        while not all(_is_ready(member) for member in self.members):
            assert time.monotonic() < deadline, "the cluster did not come up"
            time.sleep(0.05)

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    async def leader(self, stream: str) -> Member:
        """Wait for a stream's leader and return it."""
        while True:
            try:
                info = await self._info(stream)
            except (OSError, TimeoutError, nats.errors.Error):
                info = {}
            name = info.get("cluster", {}).get("leader")
            if name:
                return self.member(name)
            await asyncio.sleep(0.05)

    async def in_step(self, stream: str) -> None:
        """Wait until all three servers store the whole stream."""
        while True:
            group = (await self._info(stream)).get("cluster", {})
            if group.get("leader") and sum(one["current"] for one in group.get("replicas", ())) == 2:
                return
            await asyncio.sleep(0.05)

    async def _info(self, stream: str) -> dict[str, Any]:
        urls = [member.url for member in self.members]
        client = await nats.connect(
            urls, token=self.credentials.token, error_cb=_quietly, allow_reconnect=False
        )
        try:
            answer = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=1)
        finally:
            await client.close()
        told: dict[str, Any] = json.loads(answer.data)
        return told


@contextmanager
def running(folder: Path, *, advertises: bool = True, syncs: bool = False) -> Iterator[Cluster]:
    """A ready cluster, which is killed at the end of the block."""
    cluster = _started(folder, advertises=advertises, syncs=syncs)
    try:
        yield cluster
    finally:
        cluster.kill()


def _started(folder: Path, *, advertises: bool, syncs: bool) -> Cluster:
    """A ready cluster; started again if another program got one of its ports meanwhile."""
    for number in range(TRIES):
        place = folder / str(number)
        place.mkdir(parents=True)
        cluster = Cluster(place, advertises=advertises, syncs=syncs)
        try:
            cluster.start()
        except AssertionError:
            cluster.kill()
        else:
            return cluster
    raise AssertionError(f"the cluster did not come up, {TRIES} times")


def _is_ready(member: Member) -> bool:
    try:
        return member.tells("healthz") == {"status": "ok"} and bool(
            member.tells("jsz").get("meta_cluster", {}).get("leader")
        )
    except OSError:
        return False


def _free_ports(count: int) -> list[int]:
    """Below the ephemeral ports: a client that connects to a dead server there may get that server's port."""
    return list(itertools.islice(filter(_is_free, random.sample(range(10_240, 32_768), 1_000)), count))


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind((HOST, port))
        except OSError:
            return False
    return True


async def _quietly(_: Exception) -> None:
    """These tests are about servers that are away."""
