"""`dalsegno init-security`, and a real server that runs with what it makes."""

import json
import shutil
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import msgspec
import pytest
from click.testing import CliRunner, Result

from configs.deployment import NatsSettings
from configs.nats_access import nats_credentials
from dalsegno.cli import main
from dalsegno.config import environment
from dalsegno.security import certificates
from shared.log.nats import jetstream
from shared.log.nats.credentials import Credentials, CredentialsError
from shared.log.nats.durability import StreamPolicy
from shared.log.nats.private_server import nats_server_binary
from shared.log.port import LogDeniedError, LogUnavailableError
from shared.subjects import Subjects
from tests.e2e.clients import run as run_command

SUBJECTS: Final = Subjects()
ROLES: Final = {"provisioner", "conductor", "gateway", "worker-0", "worker-1", "reader", "client"}


def init(*args: str) -> Result:
    return CliRunner().invoke(main, ["init-security", *args])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(configuration: Path, **ports: str) -> Iterator[None]:
    """The server of a configuration, with other ports than those everybody has."""
    text = configuration.read_text()
    for there, here in ports.items():
        text = text.replace(there, here)
    configuration.write_text(text)
    process = subprocess.Popen([nats_server_binary(), "--config", configuration], stderr=subprocess.PIPE)
    try:
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "security"
    result = init(str(folder), "--ranks", "2", "--client", "billing")
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def url(made: Path) -> Iterator[str]:
    port = free_port()
    told = {"0.0.0.0:4222": f"127.0.0.1:{port}", "127.0.0.1:8222": f"127.0.0.1:{free_port()}"}
    with serving(made / "nats-server.conf", **told):
        deadline = time.monotonic() + 30
        while not _listens(port):
            assert time.monotonic() < deadline
            time.sleep(0.02)  # a port sets no event
        yield f"tls://localhost:{port}"


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def shown(made: Path, role: str, **more: str) -> Credentials:
    told = {"credentials_file": str(made / "keys"), "ca_file": str(made / "ca.pem")} | more
    return nats_credentials(msgspec.convert(told, NatsSettings), role)


# ---- files -----------------------------------------------------------------------------------------
def test_each_role_has_a_key_that_nobody_else_reads(made: Path) -> None:
    keys = {path.stem: path for path in (made / "keys").iterdir()}

    assert set(keys) == ROLES | {"client-billing"}
    assert len({path.read_text() for path in keys.values()}) == len(keys)
    for path in (*keys.values(), made / "server-key.pem", made / "nats-server.conf"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (made, made / "keys"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_server_is_told_no_secret_of_a_role(made: Path) -> None:
    configuration = (made / "nats-server.conf").read_text()

    for path in (made / "keys").iterdir():
        seed = path.read_text().strip()
        assert seed not in configuration
        assert str(Credentials(seed=seed).public_key) in configuration


def test_nothing_is_written_over(made: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    again = init(str(made), "--ranks", "3")
    (tmp_path / "server.pem").write_text("mine")
    beside = init(str(tmp_path))

    for result in (again, beside):
        assert result.exit_code == 1
        assert "exists already, and nothing is overwritten" in result.output
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["server.pem"]


def test_it_says_what_to_do_next_and_no_secret(tmp_path: Path) -> None:
    folder = tmp_path / "security"
    said = init(str(folder), "--server", "log.example.org").output

    assert f"--config {folder / 'nats-server.conf'}" in said
    assert "export DALSEGNO_NATS_URL=tls://log.example.org:4222" in said
    assert f"export DALSEGNO_NATS_CA_FILE={folder / 'ca.pem'}" in said
    assert f"export DALSEGNO_NATS_CREDENTIALS_FILE={folder / 'keys'}" in said
    assert "SU" not in said


@pytest.mark.parametrize(
    ("args", "status", "hint"),
    [
        (["--client", "a.b"], 2, "'a.b': expected 1 to 64"),
        (["--server", "a", "--server", "b"], 2, "have no majority without each other"),
        (["--ranks", "0"], 2, "--ranks"),
        (["--prefix", "DS"], 2, "lower-case letters"),
        (["--cert", __file__], 2, "--cert and --key come together"),
        (["--ca", __file__], 2, "--cert and --key come together"),
    ],
)
def test_what_cannot_be_meant_is_refused(args: list[str], status: int, hint: str, tmp_path: Path) -> None:
    result = init(str(tmp_path / "security"), *args)

    assert result.exit_code == status
    assert hint in result.output
    assert not (tmp_path / "security").exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = init(str(tmp_path / "file" / "security"))

    assert result.exit_code == 1
    assert result.output.startswith("Error: cannot write")


# ---- a server with it ------------------------------------------------------------------------------
@pytest.mark.processes
async def test_every_role_comes_in_and_has_what_is_its_own(made: Path, url: str) -> None:
    await jetstream.provision(url, shown(made, "provisioner"), SUBJECTS)
    own = {
        "conductor": SUBJECTS.walk("r1"),
        "worker-1": SUBJECTS.worker(1),
        "client-billing": "ds.request.r1",
    }
    for role in (ROLES | {"client-billing"}) - {"provisioner"}:
        log = await jetstream.connect(url, credentials=shown(made, role), subjects=SUBJECTS, name=role)
        if role in own:
            assert await log.publish(own[role], b"its own") > 0
        await log.close()


@pytest.mark.processes
async def test_a_worker_is_no_conductor(made: Path, url: str) -> None:
    await jetstream.provision(url, shown(made, "provisioner"), SUBJECTS)
    log = await jetstream.connect(
        url, credentials=shown(made, "worker-0"), subjects=SUBJECTS, name="worker 0"
    )
    with pytest.raises(LogDeniedError):
        await log.publish(SUBJECTS.walk("r1"), b"as the conductor")
    await log.close()


@pytest.mark.processes
async def test_a_server_that_another_authority_vouches_for_is_not_spoken_to(
    made: Path, url: str, tmp_path: Path
) -> None:
    (tmp_path / "ca.pem").write_bytes(certificates.make(["localhost"]).authority)
    for ca_file in (str(tmp_path / "ca.pem"), ""):
        credentials = shown(made, "reader", ca_file=ca_file)
        with pytest.raises(LogUnavailableError, match=r"not the expected server: .*certificate"):
            await jetstream.connect(url, credentials=credentials, subjects=SUBJECTS, name="r", timeout_s=20)


@pytest.mark.processes
async def test_a_server_by_another_name_is_not_spoken_to(made: Path, url: str) -> None:
    other = url.replace("localhost", "127.0.0.2")
    with pytest.raises(LogUnavailableError):
        await jetstream.connect(other, credentials=shown(made, "reader"), subjects=SUBJECTS, name="reader")


@pytest.mark.processes
async def test_nothing_is_shown_to_a_server_without_tls(made: Path, tmp_path: Path) -> None:
    """Whoever stands in the server's place would be told what to show to the real one."""
    heard = bytearray()
    greeting = {"server_id": "x", "version": "2.15.1", "auth_required": True, "nonce": "abc"}

    def greet() -> None:
        line, _ = impostor.accept()
        with line:
            line.sendall(b"INFO " + json.dumps(greeting).encode() + b"\r\n")
            while data := line.recv(4096):
                heard.extend(data)

    with socket.create_server(("127.0.0.1", 0)) as impostor:
        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        address = f"nats://127.0.0.1:{impostor.getsockname()[1]}"
        with pytest.raises(LogUnavailableError, match="it does not speak TLS"):
            await jetstream.connect(address, credentials=shown(made, "reader"), subjects=SUBJECTS, name="r")
        thread.join(30)

    assert not heard


@pytest.mark.processes
async def test_files_that_are_no_certificates_are_one_line(made: Path, url: str, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing of the kind")
    with pytest.raises(CredentialsError, match=r"cannot use .*ca\.pem for TLS"):
        await jetstream.connect(
            url,
            credentials=shown(made, "reader", ca_file=str(tmp_path / "ca.pem")),
            subjects=SUBJECTS,
            name="r",
        )


@pytest.mark.processes
def test_the_commands_find_their_own_keys(made: Path, url: str) -> None:
    told = {
        "DALSEGNO_NATS_URL": url,
        "DALSEGNO_NATS_CA_FILE": str(made / "ca.pem"),
        environment.NATS_CREDENTIALS_FILE: str(made / "keys"),
    }
    of_the_reader = {environment.NATS_CREDENTIALS_FILE: str(made / "keys" / "reader.nk")}
    provisioned = run_command("provision", env=told)
    read = run_command("log", env=told)
    alone = run_command("log", env=told | of_the_reader)
    as_reader = run_command("provision", env=told | of_the_reader)

    assert provisioned.returncode == 0, provisioned.stderr
    assert read.returncode == alone.returncode == 0, read.stderr
    assert as_reader.returncode == 1
    assert "permissions violation" in as_reader.stderr
    assert len(as_reader.stderr.splitlines()) == 1


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("openssl") is None, reason="another's word on the certificates is openssl's")
def test_the_certificates_are_what_they_say(made: Path) -> None:
    told = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-verify_hostname", "localhost"]
    command = [*told, "-CAfile", str(made / "ca.pem"), str(made / "server.pem")]

    assert subprocess.run(command, capture_output=True, check=True).stdout.strip().endswith(b"OK")


# ---- certificates of one's own, and a cluster --------------------------------------------------------
def test_certificates_that_are_there_are_taken(tmp_path: Path) -> None:
    found = certificates.make(["localhost"])
    files = {"ca": found.authority, "cert": found.server, "key": found.server_key}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    args = [part for name in files for part in (f"--{name}", str(tmp_path / name))]
    result = init(str(tmp_path / "security"), *args)
    configuration = (tmp_path / "security" / "nats-server.conf").read_text()

    assert result.exit_code == 0, result.output
    assert f'cert_file: "{tmp_path / "cert"}"' in configuration
    assert f"DALSEGNO_NATS_CA_FILE={tmp_path / 'ca'}" in result.output
    assert not list((tmp_path / "security").glob("*.pem"))


@pytest.mark.processes
async def test_three_servers_are_a_cluster_that_keeps_the_log(tmp_path: Path) -> None:
    hosts = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    folder = tmp_path / "security"
    assert init(str(folder), *[part for host in hosts for part in ("--server", host)]).exit_code == 0
    ports, routes = free_port(), free_port()
    with ExitStack() as servers:
        for number, host in enumerate(hosts, start=1):
            configuration = folder / f"nats-server-{number}.conf"
            told = {
                "0.0.0.0:4222": f"{host}:{ports}",
                "0.0.0.0:6222": f"{host}:{routes}",
                ":6222": f":{routes}",
                'http: "127.0.0.1:8222"': "",
                f'"{folder / "log"}"': f'"{folder / f"log-{number}"}"',
            }
            servers.enter_context(serving(configuration, **told))
        url = ",".join(f"tls://{host}:{ports}" for host in hosts)
        keeping = StreamPolicy(durability="cluster")
        await jetstream.provision(url, shown(folder, "provisioner"), SUBJECTS, keeping, timeout_s=60)
        log = await jetstream.connect(
            url,
            credentials=shown(folder, "conductor"),
            subjects=SUBJECTS,
            name="conductor",
            durability="cluster",
            timeout_s=60,
        )
        try:
            assert await log.publish(SUBJECTS.walk("r1"), b"on three servers") == 1
        finally:
            await log.close()


@pytest.mark.processes
def test_a_role_with_anothers_key_ends_for_good_and_says_what_was_denied(made: Path, url: str) -> None:
    told = {
        "DALSEGNO_NATS_URL": url,
        "DALSEGNO_NATS_CA_FILE": str(made / "ca.pem"),
        environment.NATS_CREDENTIALS_FILE: str(made / "keys"),
    }
    assert run_command("provision", env=told).returncode == 0
    ended = run_command(
        "conductor",
        "--config",
        "demo",
        env=told | {environment.NATS_CREDENTIALS_FILE: str(made / "keys" / "worker-0.nk")},
    )

    assert ended.returncode == 78
    last = ended.stderr.splitlines()[-1]
    assert "permissions violation" in last
    assert '"ds.beat.' in last
    assert last.startswith("Error: NATS at localhost:")
