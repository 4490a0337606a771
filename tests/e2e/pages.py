"""Documentation pages as tests: commands with their output, programs, settings, links.

A ```console block is a terminal: a line that starts with `$ ` is typed, the following lines are its output.
Commands run unchanged, in a folder that looks like a clone of the repository, on a running deployment; only
the
page's addresses are replaced by the real ones. The output must equal the page, except for values that vary
(`masked`) and for three dots, which stand for any lines on a line of their own, and for any text within a
line.

Commands that cannot run here are in `NOT_RUN`, each with the reason; their own parser checks them instead. A
```text block after a ```python block is the output of that program.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final

import click
import yaml

from benchmarks.__main__ import MEASUREMENTS, TABLES
from dalsegno.cli import main
from dalsegno.config import environment
from shared.log.nats.private_server import nats_server_binary
from tests.e2e.clients import PATIENCE_S, ROOT
from tests.e2e.deploy import Running

URL: Final = "http://127.0.0.1:8000"
NATS_URL: Final = "nats://127.0.0.1:4222"
DATA_DIR: Final = ".dalsegno/demo"
READY_FILE: Final = '"ready.json"'

NOT_RUN: Final[Mapping[str, str]] = {
    "make": "it sets up a virtual environment, serves until it is stopped, measures, or is what runs this",
    "dalsegno serve": "it serves until it is stopped, as every deployment of these tests does",
    "dalsegno studio": "it serves until it is stopped; tests/dalsegno/studio opens its pages in a browser",
    "docker": "it needs an engine and an image registry; deploy/smoke.sh tries all of it",
    "pip": "it asks a package index; the family's own test has it installed",
}
"""What is not run but parsed, by how the command begins; and why."""

_OF_THE_MAKE_AROUND: Final = frozenset({"ARGS", "JOBS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES"})
"""What `make test ARGS=...` leaves to every make below it."""
_DOTS: Final = (
    (re.compile(r"^\\.\\.\\.\n", re.MULTILINE), r"(?:.*\n)*"),
    (re.compile(r"\n\\.\\.\\.$"), r"(?:\n.*)*"),
    (re.compile(r" \\.\\.\\. "), r" .* "),
)
"""Escaped dots, and what they stand for: lines, the last lines, a part of a line."""
_CHANGING: Final = (
    "active_requests", "avg_latency_ms", "avg_latency_s", "avg_throughput_tok_s", "avg_tokens_per_step",
    "created", "ended", "epoch", "incarnation", "inflight_per_engine", "inflight_total", "kernels",
    "kv_total", "kv_used", "open", "pid", "prefill_misses", "prefix_hits", "prefix_misses",
    "requests_failed", "requests_processed", "requests_timeout", "running", "seq", "silent_s", "state",
    "steps", "tokens_generated", "total_requests", "uptime", "uptime_seconds", "version", "waiting",
)  # fmt: skip
_OTHERS_EVERY_TIME: Final = (
    (re.compile(rf'("(?:{"|".join(_CHANGING)})":)[^,}}]+'), r"\1_"),
    (re.compile(r"\b(c|g)-[0-9a-f]{8}\b"), r"\1-_"),
    (re.compile(r"\b(chatcmpl|cmpl|gen|req|py)-(?:[0-9a-f]{24}|[0-9a-f]{8}-[0-9a-f]{16})\b"), r"\1-_"),
    (re.compile(r"sequence \d+ of the log"), "sequence _ of the log"),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ][\d:.]+Z?"), "TIME"),
    (re.compile(r"^(TIME(?: +\+[\d.]+ ms)?) +\d+ ", re.MULTILINE), r"\1 SEQ "),
    (re.compile(r"[+]?\b[\d.]+ (ms|s)\b"), r"_ \1"),
    (re.compile(r"\bafter _ m?s\b"), "after _ s"),
    (re.compile(r"_ ms +\d+$", re.MULTILINE), "_ ms EVENTS"),
    (re.compile(r"\b(w\d+|conductor)/\d+"), r"\1/_"),
    (re.compile(r"\b(seed|life|chunk) \(?\d+\)?"), r"\1 _"),
    (re.compile(r"\breplay of [\d,]+ events"), "replay of _ events"),
    (re.compile(r"\(\d+ events\)"), "(_ events)"),
    (re.compile(r"\b\d+ events of (\S+), [\d,]+ bytes"), r"_ events of \1, _ bytes"),
    (re.compile(r"\[\d+/\d+\] +\d+"), "[_] SEQ"),
    (re.compile(r"\brecord \d+"), "record _"),
    (re.compile(r"-fork-[0-9a-f]{6}\b"), "-fork-_"),
    (re.compile(r"\bkey [0-9a-f]{16}\b"), "key _"),
    (re.compile(r'"[0-9a-f]{32}"'), '"DIGEST"'),
    (re.compile(r"[\d,]+ events in _ s \([\d,]+ events/s\)"), "_ events in _ s"),
    (re.compile(r"\b\d+(?:\.\d)? %"), "_ %"),
    (re.compile(r"^unusual: .*\n", re.MULTILINE), ""),  # it depends on the requests of other tests
    (re.compile(r"\bin \d+ chunks; longest pause"), "in _ chunks; longest pause"),
    # Drafts depend on measured times, and steps on drafts.
    (re.compile(r"\b[\d,]+ engine steps(, [\d,]+ of [\d,]+ drafted tokens accepted)?"), "_ engine steps"),
    (re.compile(r"; \w+ accepted \d+ of \d+ drafted tokens(, and drafted none in \d+ steps?)?"), ""),
    (re.compile(r" {2,}"), " "),
    (re.compile(r"^ ?_ m?s _ m?s _ %", re.MULTILINE), "FROM TOOK SHARE"),
)


def masked(text: str) -> str:
    """The text without values that vary: times, generated ids, log positions."""
    for pattern, replacement in _OTHERS_EVERY_TIME:
        text = pattern.sub(replacement, text)
    return text


def agrees(shown: str, came: str) -> bool:
    """True if the output matches the page; the module docstring explains dots."""
    pattern = re.escape(masked(shown.strip())).replace("\\ ", " ").replace("\\\n", "\n")
    for dots, whatever in _DOTS:
        pattern = dots.sub(lambda _, whatever=whatever: whatever, pattern)  # type: ignore[misc]
    return re.fullmatch(pattern, masked(came.strip())) is not None


def blocks(text: str, language: str) -> list[str]:
    """The blocks of a page in a language."""
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)


def sessions(text: str) -> Iterator[tuple[str, str]]:
    """Each command of the page's terminals, with its output."""
    for block in blocks(text, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            end = next(place for place, line in enumerate(lines) if not line.endswith("\\")) + 1
            yield "\n".join(lines[:end]), "\n".join(lines[end:]).strip()


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of every table under a heading."""
    section = text.split(f"\n{heading}\n")[1].split("\n## ", maxsplit=1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|") and "|---" not in line]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


def named(cell: str) -> set[str]:
    """The code names in a cell."""
    return set(re.findall(r"`([^`]+)`", cell))


# ---- a page ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """The content of a fenced block."""

    language: str
    text: str


@dataclass(frozen=True, slots=True)
class Typed:
    """One command of a terminal, with its output."""

    command: str
    shown: str

    @property
    def reason_not_to_run(self) -> str | None:
        """The reason why it is only parsed; None for a command that runs."""
        plain = " ".join(words(self.command))
        found = [key for key in NOT_RUN if plain == key or plain.startswith(f"{key} ")]
        return NOT_RUN[found[0]] if found else None


@dataclass(frozen=True, slots=True)
class Page:
    """One Markdown file of the repository.

    Attributes:
        name: its path from the root: `docs/http.md`.
    """

    name: str

    @property
    def path(self) -> Path:
        return ROOT / self.name

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def blocks(self) -> list[Block]:
        found = re.findall(r"^ *```([\w-]*)\n(.*?)^ *```$", self.text, re.MULTILINE | re.DOTALL)
        return [Block(language, text) for language, text in found]

    @property
    def typed(self) -> list[Typed]:
        """The commands of all its terminals, in order."""
        return [Typed(command, shown) for command, shown in sessions(self.text)]

    @property
    def programs(self) -> list[tuple[str, str | None]]:
        """Its Python programs, with their output where the page shows it."""
        pairs = pairwise([*self.blocks, Block("", "")])
        return [
            (block.text, behind.text if behind.language == "text" else None)
            for block, behind in pairs
            if block.language == "python"
        ]

    @property
    def said(self) -> list[str]:
        """Our own commands in its sentences and tables, except patterns of commands."""
        found = re.findall(r"`(dalsegno [a-z]+ [^`]+)`", self._prose())
        return [command for command in found if not re.search(r"[|<>]|\.\.\.", command)]

    @property
    def links(self) -> list[str]:
        """The targets of its links within the repository."""
        found = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", self._prose())
        return [target for target in found if not re.match(r"[a-z]+:", target)]

    @property
    def anchors(self) -> set[str]:
        """The anchors that a link can name, as GitHub derives them from the headings."""
        found: list[str] = []
        for heading in re.findall(r"^#{1,6} +(.*?)\s*$", self._prose(), re.MULTILINE):
            slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            copies = found.count(slug)
            found.append(slug if not copies else f"{slug}-{copies}")
        return set(found)

    def _prose(self) -> str:
        return re.sub(r"^ *```.*?^ *```$", "", self.text, flags=re.MULTILINE | re.DOTALL)


def leads_somewhere(page: Page, target: str) -> bool:
    """True if the file of a link exists, and the heading that it names."""
    file, _, anchor = target.partition("#")
    path = (page.path.parent / file).resolve() if file else page.path
    if not path.exists() or not path.is_relative_to(ROOT):
        return False
    return not anchor or (path.suffix == ".md" and anchor in Page(str(path.relative_to(ROOT))).anchors)


def all_pages() -> list[Page]:
    """Every documentation page of the repository."""
    folders = [ROOT / name for name in ("benchmarks", "configs", "deploy", "docs")]
    paths = [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))]
    return [Page(str(path.relative_to(ROOT))) for path in sorted(paths) if "node_modules" not in path.parts]


# ---- what is run -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The real values of a page's addresses.

    Attributes:
        real: the address on the page, and its real value.
        variables: additional environment variables of every command.
    """

    real: Mapping[str, str]
    variables: Mapping[str, str]

    @classmethod
    def of(cls, running: Running) -> "Place":
        """The values of a running deployment."""
        return cls(
            real={
                URL: running.url,
                NATS_URL: running.nats_url,
                READY_FILE: json.dumps(str(running.ready_file)),
                DATA_DIR: str(running.data_dir),
            },
            variables={environment.DATA_DIR: str(running.data_dir)},
        )


class Terminal:
    """A terminal in a folder that looks like a clone, for one page on one deployment.

    `export`ed variables stay for later commands. Between two commands only they and files are kept.
    """

    def __init__(self, folder: Path, place: Place) -> None:
        self._folder, self._place = folder, place
        self._exports: list[str] = []
        self._begun: list[subprocess.Popen[bytes]] = []
        for path in ROOT.iterdir():
            if not path.name.startswith("."):
                (folder / path.name).symlink_to(path)
        programs = folder / ".venv" / "bin"
        programs.mkdir(parents=True)
        python = shlex.quote(sys.executable)
        url = place.real[URL]
        ask = f'[ "$1" = ask ] && {{ shift; exec {python} -m dalsegno ask --url {url} "$@"; }}'
        for name, script in {
            "python": f'exec {python} "$@"',
            "dalsegno": f'{ask}\nexec {python} -m dalsegno "$@"',
            "nats-server": f'exec {shlex.quote(str(nats_server_binary()))} "$@"',
        }.items():
            (programs / name).write_text(f"#!/bin/sh\n{script}\n")
            (programs / name).chmod(0o755)
        search = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": search, **place.variables}

    def type(self, command: str) -> str:
        """Run a command to its end; return its stdout.

        Raises:
            AssertionError: its exit status is not 0.
        """
        if command.startswith("export "):
            self._exports.append(self._real(command))
            return ""
        return self._ended(command, *self._shell(command))

    def run(self, program: str) -> str:
        """Run a Python program to its end; return its stdout."""
        return self._ended(program, sys.executable, "-c", self._real(program))

    def write(self, name: str, text: str) -> None:
        """Write a file of the page to the terminal's folder."""
        (self._folder / name).write_text(self._real(text))

    def begin(self, command: str) -> None:
        """Start a command that runs until `close`."""
        with (self._folder / "begun.txt").open("ab") as output:
            self._begun.append(
                subprocess.Popen(
                    self._shell(f"exec {command}"),
                    stdout=output, stderr=output, cwd=self._folder, env=self._environment,
                )
            )  # fmt: skip

    def close(self) -> None:
        """Stop all started commands, the last one first."""
        for process in reversed(self._begun):
            process.terminate()
            process.wait(PATIENCE_S)

    def _shell(self, command: str) -> tuple[str, ...]:
        return "bash", "-o", "pipefail", "-c", "\n".join([*self._exports, self._real(command)])

    def _ended(self, what: str, *argv: str) -> str:
        ended = subprocess.run(
            argv, capture_output=True, text=True, check=False, timeout=PATIENCE_S,
            cwd=self._folder, env=self._environment,
        )  # fmt: skip
        assert ended.returncode == 0, f"{what}\n{ended.stdout}{ended.stderr}"
        return self._shown(ended.stdout)

    def _real(self, text: str) -> str:
        for page, real in self._place.real.items():
            text = text.replace(page, real)
        return text

    def _shown(self, text: str) -> str:
        for page, real in self._place.real.items():
            text = text.replace(real, page)
        return text


def run(
    page: Page,
    terminal: Terminal,
    *,
    begin: Callable[[str], bool] = lambda _: False,
    runs_programs: bool = True,
) -> None:
    """Run the commands and programs of a page from top to bottom, and compare the output.

    `begin` may take a command that does not end, and then returns True. With `runs_programs` False, the
    programs
    are parts of files, which another test runs.

    Raises:
        AssertionError: with the command, the expected and the real output.
    """
    typed, programs = iter(page.typed), iter(page.programs)
    for block in page.blocks:
        if block.language == "console":
            for _ in re.findall(r"^\$ ", block.text, re.MULTILINE):
                one = next(typed)
                if one.reason_not_to_run is not None:
                    parse(one.command)
                    continue
                if not begin(one.command):
                    _compare(one.command, one.shown or None, terminal.type(one.command))
        elif block.language == "python" and runs_programs:
            program, shown = next(programs)
            _compare(program, shown, terminal.run(program))


def _compare(what: str, shown: str | None, came: str) -> None:
    if shown is not None:
        told = f"{what}\n--- shown\n{masked(shown)}\n--- came\n{masked(came)}"
        assert agrees(shown, came), told


# ---- what is parsed --------------------------------------------------------------------------------------


def words(command: str) -> list[str]:
    """The words of a command, without variables, comments, and the folder of its program."""
    found = shlex.split(command, comments=True)
    while found and re.match(r"[A-Z_]+=", found[0]):
        del found[0]
    return [found[0].removeprefix(".venv/bin/"), *found[1:]]


def parse(command: str) -> None:
    """Parse a command with the parser of its program, where that is installed.

    Raises:
        AssertionError: the command is invalid, and why.
    """
    subprocess.run(["bash", "-n", "-c", command], check=True)
    program, *args = words(command)
    match program, args:
        case "dalsegno", [name, *arguments]:
            _parse_ours(name, arguments)
        case "make", _:
            # -n: it says what it would do. PYTHON: it need not look for one.
            told = ["make", "-n", f"PYTHON={sys.executable}", *args]
            env = {key: value for key, value in os.environ.items() if key not in _OF_THE_MAKE_AROUND}
            done = subprocess.run(told, cwd=ROOT, check=True, capture_output=True, text=True, env=env)
            for names in re.findall(r"-m benchmarks(.*)", done.stdout):
                assert names.startswith(" peers") or set(names.split()) <= {*MEASUREMENTS, *TABLES}, command
        case "pip", ["install", what]:
            assert (ROOT / what / "pyproject.toml").is_file(), command
        case "docker", ["compose", *arguments]:
            _parse_compose(arguments)
        case "docker", ["run", *arguments]:
            [volume] = [value.partition(":")[0] for key, value in pairwise(arguments) if key == "-v"]
            assert volume.removeprefix("dalsegno_") in _compose()["volumes"], command
        case _:
            raise AssertionError(f"nobody here can parse {command!r}")


def _parse_ours(name: str, arguments: list[str]) -> None:
    found = main.get_command(click.Context(main), name)
    assert found is not None, name
    parsed = found.make_context(name, list(arguments))
    model = parsed.params.get("model")
    if name == "serve" and str(model).startswith("docs/"):
        assert (ROOT / str(model)).is_file()


def _parse_compose(arguments: list[str]) -> None:
    services, profiles = _compose()["services"], {"cpu", "gpu", "observability", "studio", "two-ranks"}
    assert profiles == {one for service in services.values() for one in service.get("profiles", [])}
    rest = list(arguments)
    while rest[0] == "--profile":
        assert rest[1] in profiles
        del rest[:2]
    name, *rest = rest
    plain = [word for word in rest if not word.startswith("-")]
    match name, plain:
        case "exec", [service, "dalsegno", *_]:
            assert service in services
            _, command, *args = rest[rest.index("dalsegno") - 1 :][1:]
            _parse_ours(command, args)
        case "restart" | "kill" | "logs" | "stop" | "start" | "up" | "down", _:
            assert set(plain) <= set(services), plain
        case _:
            raise AssertionError(f"docker compose {name} is not known to these tests")


@cache
def _compose() -> dict[str, dict[str, dict[str, list[str]]]]:
    found: dict[str, dict[str, dict[str, list[str]]]] = yaml.safe_load(
        (ROOT / "deploy" / "docker-compose.yml").read_text(encoding="utf-8")
    )
    return found
