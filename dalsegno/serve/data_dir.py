"""The data dir: what a deployment keeps between two starts, and who has it open.

    <data dir>/lock              held (flock) by the launcher that runs on it; the kernel lets go of it
    <data dir>/deployment.json   how to reach that deployment, while it runs (mode 0600: it has secrets)
    <data dir>/nats/             the log: JetStream's own files
    <data dir>/logs/             one file per role
    <data dir>/conductor/        what a conductor notes for a quick start; has prompts
    <data dir>/configs/          by digest, what was served: requests name the digest they were decided under

The default is `.dalsegno/<model>` in the current folder: beside the work it belongs to, seen by `ls -a`,
and gone with `rm -r`.
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

from configs.deployment import SECTIONS, DeploymentConfig
from shared.errors import ClientError, DalSegnoError


class DataDirError(ClientError):
    """The data dir cannot be used; says which and why."""

    code = "data_dir"


class Pids(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of a deployment; None and absent is what does not run or is not ours."""

    nats: int | None
    gateway: list[int]
    conductor: list[int]
    worker: dict[str, int]


class RunningDeployment(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a running deployment: what `--ready-file` and `deployment.json` hold (`ReadyFile`).

    Attributes:
        nats_token: the token of a server that was joined, if it has one for all.
        nats_client: what a service shows that asks over NATS: the arguments of `Credentials`.
        nats_reader: the same for who only reads the log.
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
    """A data dir that is held; `is_used` is for the holder to say, once there is something in it to keep."""

    is_used: bool = False


@dataclass(frozen=True, slots=True)
class DataDir:
    """One deployment's folder."""

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

    def remember(self, config: DeploymentConfig) -> None:
        """Keep what decisions depend on, for whoever asks later under which configuration they were made.

        Raises:
            DataDirError: it cannot be written.
        """
        try:
            self._configs.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise DataDirError(f"cannot write {self._configs}: {error.strerror}") from error
        own = {"data_dir", "devices", *SECTIONS}
        told = {
            name: value for name, value in msgspec.to_builtins(config.decisive).items() if name not in own
        }
        write_private(self._configs / f"{config.digest}.json", told)

    def configs(self) -> dict[str, Any]:
        """Every configuration that was served from here, by its digest."""
        found: dict[str, Any] = {}
        for path in sorted(self._configs.glob("*.json")):
            with contextlib.suppress(OSError, msgspec.DecodeError):  # damaged: it is not known any more
                found[path.stem] = msgspec.json.decode(path.read_bytes())
        return found

    @property
    def _configs(self) -> Path:
        return self.path / "configs"

    @contextlib.contextmanager
    def lock(self) -> Iterator[Hold]:
        """Hold this folder, made if it is not there; for as long as the context is open.

        One that was made here is removed again where an error of ours ends the context before it is used.

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
        """The deployment that runs on this folder now and is ready; None if there is none."""
        try:
            handle = os.open(self.lock_file, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read_deployment(self.deployment_file)
        else:
            return None  # nobody holds the lock: whatever the file says is of the past
        finally:
            os.close(handle)


def of(model_name: str, told: Path | None = None) -> DataDir:
    """The data dir of a model: the one told, else `.dalsegno/<model>`."""
    path = told or Path(".dalsegno") / model_name
    return DataDir(path.expanduser().resolve())


def of_deployment(config: DeploymentConfig) -> DataDir:
    """The data dir of a deployment."""
    return of(config.name, Path(config.data_dir) if config.data_dir is not None else None)


def write_private(path: Path, content: Any) -> None:
    """Write `content` as JSON so that a reader sees all of it or nothing, and only our user sees it.

    Raises:
        DataDirError: the file cannot be written.
    """
    os.close(_written(path, content))


@dataclass(slots=True)
class ReadyFile:
    """A file that says that a deployment is ready: true for as long as whoever wrote it holds it (flock).

    Who is killed cannot remove it. But the kernel lets go of it then, and so it is known for a lie: a process
    id alone could be another's by now, or be of another container.
    """

    path: Path
    _handle: int | None = None

    def write(self, deployment: RunningDeployment) -> None:
        """Write it, or write it anew.

        Raises:
            DataDirError: it cannot be written.
        """
        before, self._handle = self._handle, _written(self.path, deployment, hold=True)
        if before is not None:
            os.close(before)

    def clear(self) -> None:
        """Remove what one that was killed left there, before anything of ours is there.

        Raises:
            ClientError: a deployment that runs holds it, or it cannot be removed.
        """
        if is_held(self.path):
            raise ClientError(
                f"{self.path} is the ready file of a deployment that runs; name another", code="ready_file"
            )
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise ClientError(f"cannot remove {self.path}: {error.strerror}", code="ready_file") from error

    def withdraw(self) -> None:
        """Remove it, if it was written: it would be a lie from here on."""
        if self._handle is None:
            return
        with contextlib.suppress(OSError):  # who removed it before did the same
            self.path.unlink()
        os.close(self._handle)
        self._handle = None


def is_held(path: Path) -> bool:
    """Whether the launcher that wrote it still lives; else it tells of the past."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        is_the_one = os.path.samestat(os.fstat(handle), path.stat())
    except BlockingIOError:
        return True
    except OSError:  # it is gone by now
        return False
    finally:
        os.close(handle)
    return not is_the_one and is_held(path)  # it was written anew while we looked


def _written(path: Path, content: Any, *, hold: bool = False) -> int:
    """Write a file, see `write_private`; its handle, which holds it (flock) where it is to."""
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
        told = f"is in use by another deployment (process {holder})"
        if running is not None:
            told = f"is already serving (process {holder}) at {running.url}"
        raise DataDirError(
            f"the data dir {data_dir.path} {told}; stop that one, or name another with --data-dir"
        ) from error
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)


def _unmake(made: list[Path]) -> None:
    """Remove the folders that were made: the innermost with all it has, the others if they are empty."""
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
