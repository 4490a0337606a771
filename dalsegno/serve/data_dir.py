"""The data dir of a deployment: its log and configurations between two starts, and a lock on it.

    <data dir>/lock              held (flock) by the running launcher; the kernel releases it with the process
    <data dir>/deployment.json   addresses of the running deployment (mode 0600: it contains secrets)
    <data dir>/nats/             the log: JetStream's files
    <data dir>/logs/             one file per role
    <data dir>/conductor/        the conductor's snapshots for a quick start; they contain prompts
    <data dir>/index/            an index of the log's requests for `dalsegno log`; deletable at any time
    <data dir>/configs/          served configurations by digest: requests name the digest of theirs

The default is `.dalsegno/<model>` in the current folder: next to the user's work, visible to `ls -a`, and
removed by `rm -r`.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from configs.deployment import DeploymentConfig
from shared.errors import ClientError, DalSegnoError


class DataDirError(ClientError):
    """The data dir cannot be used; the message says which one and why."""

    code = "data_dir"


class Pids(msgspec.Struct, frozen=True, kw_only=True):
    """The process ids of a deployment; None or absent: not running, or not started by the launcher."""

    nats: int | None
    gateway: list[int]
    conductor: list[int]
    worker: dict[str, int]


class RunningDeployment(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of a running deployment: the content of `--ready-file` and `deployment.json` (`ReadyFile`).

    Attributes:
        nats_token: the token of the joined NATS server, if it has one token for all.
        nats_client: the arguments of `Credentials` for a service that submits requests over NATS.
        nats_reader: the same for a service that only reads the log.
    """

    url: str
    urls: list[str]
    nats_url: str
    nats_token: str | None
    nats_client: dict[str, str]
    nats_reader: dict[str, str]
    prefix: str
    pids: Pids


@dataclass(slots=True)
class Hold:
    """A locked data dir; its holder sets `is_used` once there is something in it to keep."""

    is_used: bool = False


@dataclass(frozen=True, slots=True)
class DataDir:
    """The folder of one deployment."""

    path: Path

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    @property
    def deployment_file(self) -> Path:
        return self.path / "deployment.json"

    @property
    def nats(self) -> Path:
        return self.path / "nats"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def index(self) -> Path:
        return self.path / "index"

    def remember(self, config: DeploymentConfig) -> None:
        """Store a configuration without its secrets, by the digest of what decisions depend on.

        Raises:
            DataDirError: it cannot be written.
        """
        try:
            self._configs.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise DataDirError(f"cannot write {self._configs}: {error.strerror}") from error
        write_private(self._configs / f"{config.digest}.json", config.recorded)

    def configs(self) -> dict[str, Any]:
        """Return every configuration that was served from this data dir, by its digest."""
        found: dict[str, Any] = {}
        for path in sorted(self._configs.glob("*.json")):
            with contextlib.suppress(OSError, msgspec.DecodeError):  # damaged: as if it were not there
                found[path.stem] = msgspec.json.decode(path.read_bytes())
        return found

    @property
    def _configs(self) -> Path:
        return self.path / "configs"

    @contextlib.contextmanager
    def lock(self) -> Iterator[Hold]:
        """Lock this folder, and create it if it does not exist, while the context is open.

        A folder created here is removed again if one of our errors ends the context before it is used.

        Raises:
            DataDirError: another process holds it, or it cannot be written.
        """
        hold = Hold()
        try:
            made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.logs.mkdir(exist_ok=True, mode=0o700)
            handle = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DataDirError(
                f"cannot use the data dir {self.path}: {error.strerror}; name another with --data-dir"
            ) from error
        try:
            _flock(handle, self)
            yield hold
        except DalSegnoError:
            if self.path in made and not hold.is_used:
                _unmake(made)
            raise
        finally:
            os.close(handle)

    def running(self) -> RunningDeployment | None:
        """Return the deployment that runs on this folder now and is ready, or None."""
        try:
            handle = os.open(self.lock_file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read_deployment(self.deployment_file)
        else:
            return None  # the lock is free: the file is stale
        finally:
            os.close(handle)


def of(model_name: str, path: Path | None = None) -> DataDir:
    """Return the data dir of a model: `path` if given, else `.dalsegno/<model>`."""
    return DataDir((path or Path(".dalsegno") / model_name).expanduser().resolve())


def of_deployment(config: DeploymentConfig) -> DataDir:
    """The data dir of a deployment."""
    return of(config.name, Path(config.data_dir) if config.data_dir is not None else None)


def write_private(path: Path, content: Any) -> None:
    """Write `content` as JSON, atomically and readable by this user only.

    Raises:
        DataDirError: the file cannot be written.
    """
    os.close(_written(path, content))


@dataclass(slots=True)
class ReadyFile:
    """A file that says that a deployment is ready, valid as long as its writer holds a lock (flock) on it.

    A killed writer cannot remove the file, but the kernel releases its lock, so readers see that it is stale.
    A process id alone could meanwhile be another process's, or be from another container.
    """

    path: Path
    _handle: int | None = None

    def write(self, deployment: RunningDeployment) -> None:
        """Write the file, or replace its content.

        Raises:
            DataDirError: it cannot be written.
        """
        before, self._handle = self._handle, _written(self.path, deployment, hold=True)
        if before is not None:
            os.close(before)

    def clear(self) -> None:
        """Remove a stale file of a killed deployment, before the start of a new one.

        Raises:
            ClientError: a running deployment holds it, or it cannot be removed.
        """
        if is_held(self.path):
            raise ClientError(
                f"{self.path} is the ready file of a running deployment; name another file", code="ready_file"
            )
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise ClientError(f"cannot remove {self.path}: {error.strerror}", code="ready_file") from error

    def withdraw(self) -> None:
        """Remove the file, if it was written: the deployment is no longer ready."""
        if self._handle is None:
            return
        with contextlib.suppress(OSError):  # already removed
            self.path.unlink()
        os.close(self._handle)
        self._handle = None


def is_held(path: Path) -> bool:
    """Return True if the launcher that wrote the file still lives; else its content is stale."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        is_the_one = os.path.samestat(os.fstat(handle), path.stat())
    except BlockingIOError:
        return True
    except OSError:  # removed meanwhile
        return False
    finally:
        os.close(handle)
    return not is_the_one and is_held(path)  # the file was replaced meanwhile


def _written(path: Path, content: Any, *, hold: bool = False) -> int:
    """Write a file as `write_private` does; return its handle, which holds the lock if `hold` is set."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if hold:
                fcntl.flock(handle, fcntl.LOCK_EX)
            with os.fdopen(handle, "w", closefd=False) as file:
                file.write(json.dumps(msgspec.to_builtins(content), indent=2) + "\n")
            draft.replace(path)
        except OSError:
            os.close(handle)
            raise
    except OSError as error:
        raise DataDirError(f"cannot write {path}: {error.strerror}") from error
    return handle


def _flock(handle: int, data_dir: DataDir) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
        running = _read_deployment(data_dir.deployment_file)
        usage = f"is in use by another deployment (process {holder})"
        if running is not None:
            usage = f"is already serving (process {holder}) at {running.url}"
        raise DataDirError(
            f"the data dir {data_dir.path} {usage}; stop that one, or name another with --data-dir"
        ) from error
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)


def _unmake(made: list[Path]) -> None:
    """Remove folders that were created: the innermost with its content, the others if they are empty."""
    data_dir, *parents = made
    shutil.rmtree(data_dir, ignore_errors=True)
    with contextlib.suppress(OSError):
        for folder in parents:
            folder.rmdir()


def _read_deployment(path: Path) -> RunningDeployment | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunningDeployment)
    except FileNotFoundError:
        return None  # locked, but not ready yet
    except (OSError, msgspec.DecodeError) as error:
        raise DataDirError(f"cannot read {path}: {error}") from error
