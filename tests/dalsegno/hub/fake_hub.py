"""A hub for tests: it speaks the protocol of the Hugging Face hub, and fails as it is told.

Small files are sent by `/resolve/`; large ones, the weights, are redirected to another host name, like a CDN.
A `Fault` is used up by one request.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".bin", ".pt")
PAGE = 4
"""Files in one page of a listing."""


@dataclass(kw_only=True)
class Fault:
    """What happens to one request whose method and path contain `on`.

    Attributes:
        status: the answer's status, without the file.
        cut: the connection ends after this many bytes of the body.
        corrupt: a byte of the body is another one.
        is_whole: `Range` is ignored.
        reached: is set when the fault has happened.
        hold: after `cut` bytes, the connection stays open until this is set.
    """

    on: str
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None
    corrupt: bool = False
    is_whole: bool = False
    reached: threading.Event = field(default_factory=threading.Event)
    hold: threading.Event | None = None


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A request."""

    method: str
    path: str
    range: str | None
    token: str | None


class FakeHub:
    """Repositories by name, each with one commit; `main` and `v1` mean it."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.needs_token: str | None = None
        self.listed: dict[str, Any] = {}
        """Entries of a listing that are other than the files."""
        self._lock = threading.Lock()
        hub = self

        class Handler(_Handler):
            fake = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def cdn(self) -> str:
        return f"http://localhost:{self.port}"

    @contextmanager
    def running(self) -> Iterator["FakeHub"]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def add(self, repository: str, folder: Path, **further: bytes) -> None:
        """Add the files of a folder, and further ones, with `__` for `/` and `_DOT_` for a dot."""
        files = {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }
        self.repositories[repository] = files | {
            name.replace("__", "/").replace("_DOT_", "."): content for name, content in further.items()
        }

    def commit(self, repository: str) -> str:
        """The hash of the present files."""
        files = self.repositories[repository]
        return hashlib.sha1(b"".join(name.encode() + files[name] for name in sorted(files))).hexdigest()

    def fault(self, seen: Seen) -> Fault | None:
        """Take the fault of a request, and remember the request."""
        with self._lock:
            self.seen.append(seen)
            found = next((one for one in self.faults if one.on in f"{seen.method} {seen.path}"), None)
            if found is not None:
                self.faults.remove(found)
            return found

    def paths(self, method: str, part: str = "") -> list[str]:
        """The paths of the requests so far, without queries."""
        return [one.path for one in self.seen if one.method == method and part in one.path]


def git_sha1(content: bytes) -> str:
    """The digest by which git names a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        seen = Seen(method=self.command, path=path, range=self.headers.get("Range"), token=token)
        fault = self.fake.fault(seen)
        try:
            if fault is not None and fault.status:
                fault.reached.set()
                self._send(fault.status, b"", fault.headers)
            elif path.startswith("/cdn/"):
                self._file(self._content(path.removeprefix("/cdn/")), {}, fault)
            elif self.fake.needs_token is not None and token != self.fake.needs_token:
                self._send(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
            elif path.startswith("/api/models/"):
                self._api(path.removeprefix("/api/models/"))
            else:
                self._resolve(path, fault)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _api(self, path: str) -> None:
        repository, kind, revision = ["/".join(path.split("/")[:2]), *path.split("/")[2:4]]
        if repository not in self.fake.repositories:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        commit = self.fake.commit(repository)
        if revision not in {"main", "v1", commit}:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if kind == "revision":
            return self._json({"id": repository, "sha": commit, "siblings": []})
        entries = [self._entry(*item) for item in sorted(self.fake.repositories[repository].items())]
        entries += [{"type": "file", "path": name, **it} for name, it in self.fake.listed.items()]
        start = int(dict(part.split("=") for part in urlsplit(self.path).query.split("&")).get("cursor", 0))
        query = f"{path}?recursive=true&cursor={start + PAGE}"
        more = {"Link": f'<{self.fake.endpoint}/api/models/{query}>; rel="next"'}
        return self._json(entries[start : start + PAGE], more if start + PAGE < len(entries) else {})

    @staticmethod
    def _entry(name: str, content: bytes) -> dict[str, Any]:
        large = {"lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 1}}
        return {
            "type": "file",
            "path": name,
            "size": len(content),
            "oid": git_sha1(content),
            **(large if name.endswith(LARGE) else {}),
        }

    def _resolve(self, path: str, fault: Fault | None) -> None:
        repository, _, rest = path.lstrip("/").partition("/resolve/")
        commit, _, name = rest.partition("/")
        content = self.fake.repositories.get(repository, {}).get(name)
        if content is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": commit}
        if not name.endswith(LARGE):
            return self._file(content, {**headers, "ETag": f'"{git_sha1(content)}"'}, fault)
        digest = hashlib.sha256(content).hexdigest()
        linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        where = {"Location": f"{self.fake.cdn}/cdn/{digest}"}
        return self._send(302, b"", {**headers, **linked, **where})

    def _content(self, digest: str) -> bytes:
        files = (content for files in self.fake.repositories.values() for content in files.values())
        return next(content for content in files if hashlib.sha256(content).hexdigest() == digest)

    def _file(self, content: bytes, headers: Mapping[str, str], fault: Fault | None) -> None:
        asked = self.headers.get("Range")
        status, total = 200, len(content)
        if fault is not None and fault.corrupt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if asked and not (fault is not None and fault.is_whole):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            end = min(int(last or total - 1), total - 1)
            headers = {**headers, "Content-Range": f"bytes {first}-{end}/{total}"}
            status, content = 206, content[int(first) : end + 1]
        self._send(status, content, headers, fault)

    def _json(self, value: object, headers: Mapping[str, str] | None = None) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], fault: Fault | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None and fault.cut is not None:
            self.wfile.write(body[: fault.cut])
            self.wfile.flush()
            fault.reached.set()
            if fault.hold is not None:
                fault.hold.wait(60)
            self.close_connection = True
            return
        self.wfile.write(body)
        if fault is not None:
            fault.reached.set()
