"""Processes that a template forks, beside what a new program would be."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from dalsegno.templates import forking
from dalsegno.templates.order import REPORT, Order
from dalsegno.templates.template import Template
from tests.dalsegno.fakes import gone, runs
from tests.dalsegno.templates import scripts

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not forking.is_supported(), reason="templates need pidfds: Linux 5.3"),
]
_PAUSES = "__import__('select').select([], [], [], 0.05)"
"""Longer than the main thread takes to its end."""
_WAITS = "import signal; print('up', flush=True); signal.pause()"


@dataclass(slots=True)
class Process:
    """A forked process: `pid`, and what it wrote until its end."""

    report: int
    read: int
    pid: int

    def line(self) -> str:
        """Its next line; the empty string if it has ended."""
        said = b""
        while not said.endswith(b"\n") and (data := os.read(self.read, 1)):
            said += data
        return said.decode().strip()

    def end(self) -> tuple[int | None, str]:
        """Wait for the end of its output and of its report; None if no status was reported."""
        said = b""
        while data := os.read(self.read, 65536):
            said += data
        data = os.read(self.report, REPORT.size)
        return (REPORT.unpack(data)[0] if data else None), said.decode()


@pytest.fixture(scope="module")
def shared() -> Iterator[Template]:
    with scripts.template("import os; os.environ['BEFORE'] = '1'; import colorsys") as found:
        yield found


@pytest.fixture
def files() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def started(
    template: Template, files: ExitStack, script: str, *args: str, cwd: Path | None = None, **env: str
) -> Process:
    read, write = os.pipe()
    nothing = os.open(os.devnull, os.O_RDONLY)
    files.callback(os.close, read)
    order = Order(name="role-1", args=(script, *args), env=env, cwd=str(cwd) if cwd else None)
    try:
        report = template.start(order, [nothing, write, write])
    finally:
        os.close(write)
        os.close(nothing)
    files.callback(os.close, report)
    data = os.read(report, REPORT.size)
    return Process(report, read, REPORT.unpack(data)[0] if data else 0)


def children_of(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


def test_a_process_has_the_arguments_environment_folder_and_input_of_its_order(
    shared: Template, files: ExitStack, tmp_path: Path
) -> None:
    script = "import os, sys; print(sys.argv[1:], dict(os.environ), os.getcwd(), repr(sys.stdin.read()))"
    status, said = started(shared, files, script, "a", "b c", cwd=tmp_path, NAME="value").end()
    assert (status, said) == (0, f"['a', 'b c'] {{'NAME': 'value'}} {tmp_path} ''\n")


def test_a_process_leads_a_group_has_its_name_and_shows_no_environment(
    shared: Template, files: ExitStack
) -> None:
    process = started(shared, files, _WAITS, SEED="secret")
    assert process.line() == "up"
    assert os.getpgid(process.pid) == process.pid
    assert Path(f"/proc/{process.pid}/comm").read_text() == "role-1\n"
    assert b"secret" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    os.kill(process.pid, signal.SIGTERM)
    assert process.end() == (-signal.SIGTERM, "")


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("raise SystemExit(78)", 78),
        ("import os; os._exit(7)", 7),
        ("import os; os.abort()", -signal.SIGABRT),
        ("raise KeyError('x')", 1),
        ("raise SystemExit('a message')", 1),
        ("import sys; sys.stdout.close(); raise SystemExit(3)", 3),
        ("import atexit; atexit.register(print, 'last')", 0),
        ("import sys; sys.stdout.reconfigure(line_buffering=False); print('kept until the end', end='')", 0),
        (f"import threading; threading.Thread(target=lambda: ({_PAUSES}, print('later'))).start()", 0),
        (f"import concurrent.futures as c; c.ThreadPoolExecutor().submit(lambda: ({_PAUSES}, print(9)))", 0),
    ],
)
def test_the_end_of_a_process_is_reported(
    shared: Template, files: ExitStack, script: str, status: int
) -> None:
    program = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    ended, said = started(shared, files, script).end()
    assert ended == program.returncode == status
    assert said.splitlines()[-1:] == (program.stdout + program.stderr).splitlines()[-1:]


def test_imports_are_in_place_and_nothing_of_the_template_is(shared: Template, files: ExitStack) -> None:
    script = """
import os, sys, threading, signal
print("colorsys" in sys.modules, "BEFORE" in os.environ, len(threading.enumerate()))
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
files = [f"/proc/self/fd/{number}" for number in range(3, 256)]
print(*{os.readlink(file).partition(":")[0] for file in files if os.path.lexists(file)}, "-")
"""
    waiting = started(shared, files, _WAITS)  # its files must not be there either
    assert waiting.line() == "up"
    _, said = started(shared, files, script).end()
    os.kill(waiting.pid, signal.SIGKILL)
    first, second, third = said.splitlines()
    assert (first, second) == ("True False 1", "True")
    assert not {"socket", "pipe", "anon_inode"} & set(third.split())


async def test_what_a_process_started_ends_with_it_and_nothing_is_left_unwaited(
    shared: Template, files: ExitStack
) -> None:
    script = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-I", "-c", "import signal; signal.pause()"]).pid, flush=True)
"""
    process = started(shared, files, script)
    status, said = process.end()  # the child would hold the output open
    assert status == 0
    await gone(int(said))
    assert str(process.pid) not in children_of(shared.pid).split()


def test_processes_run_at_once_and_end_in_any_order(shared: Template, files: ExitStack) -> None:
    both = [started(shared, files, _WAITS) for _ in range(2)]
    assert [process.line() for process in both] == ["up", "up"]
    for process, number in zip(both[::-1], (signal.SIGKILL, signal.SIGTERM), strict=True):
        os.kill(process.pid, number)
        assert process.end()[0] == -number


def test_two_processes_draw_different_random_numbers(shared: Template, files: ExitStack) -> None:
    script = "import random, uuid; print(random.random(), uuid.uuid4())"
    assert started(shared, files, script).end() != started(shared, files, script).end()


def test_a_template_whose_library_keeps_a_thread_forks_nothing(
    files: ExitStack, capfd: pytest.CaptureFixture[str]
) -> None:
    imports = (
        "import threading; threading.Thread(target=threading.Event().wait, name='pool', daemon=True).start()"
    )
    with scripts.template(imports) as found, suppress(BrokenPipeError):  # it may end before the order comes
        assert started(found, files, _WAITS).pid == 0
    said = capfd.readouterr().err
    assert "processes are started without a template: 2 threads run where one was expected" in said
    assert "pool" in said


def test_an_import_that_fails_is_left_to_the_process(files: ExitStack) -> None:
    with scripts.template("import colorsys, no_such_module") as found:
        _, said = started(found, files, "import sys; print('colorsys' in sys.modules)").end()
    assert said == "True\n"


async def test_a_template_ends_with_its_owner_and_leaves_no_process_that_watches_it(files: ExitStack) -> None:
    watches = "from dalsegno.roles.parent_watch import die_with; die_with(int(__import__('sys').argv[1])); "
    with scripts.template() as found:
        process = started(found, files, watches + _WAITS, str(found.pid))
        assert process.line() == "up"
    assert process.end() == (None, "")
    await gone(process.pid)


async def test_the_templates_of_a_killed_program_end_with_it(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("raise SystemExit('the file in the current folder')")
    script = """
import os, signal, sys
from dalsegno.templates.template import templates
def imports():
    import colorsys
with templates({"one": imports, "two": imports}, None) as found:
    print(*(one.pid for one in found.values()), flush=True)
    signal.pause()
"""
    with subprocess.Popen(  # noqa: ASYNC220 - nothing else runs in this loop
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(runs, pids))
        owner.kill()
    await gone(*pids)


def test_a_block_that_ends_ends_its_templates_whatever_they_do() -> None:
    script = """
import os
from dalsegno.templates.template import templates
def imports():
    import signal
    signal.pause()
with templates({"one": imports, "two": imports}, None) as found:
    pass
try:
    os.wait()
except ChildProcessError:
    print("none left")
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
with templates({"one": imports}, None) as found:
    print(found)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines() == ["none left", "{}"]


def test_a_forked_role_finds_no_module_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("print('the file in the current folder')")
    script = """
import os, sys
from dalsegno.templates.order import REPORT, Order
from dalsegno.templates.template import templates
def main(args):
    import colorsys
    print(args, colorsys.__name__)
with templates({"one": lambda: None}, main) as found:
    report = found["one"].start(Order(name="x", args=("a",), env={}), [0, 1, 2])
    while os.read(report, REPORT.size):
        pass
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60, cwd=tmp_path
    )
    assert done.stdout == "('a',) colorsys\n"
