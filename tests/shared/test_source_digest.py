"""What is reached changes a digest, and what is not does not: `EDITED` is the place that is edited."""

import ast
import py_compile
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from textwrap import dedent
from types import FrameType
from typing import Any, Final

import pytest

from conductor import digests
from conductor.core import snapshot
from conductor.core.cluster import Cluster
from dalsegno.bundle import bundle_file
from models import registry
from shared.source_digest import MissingSourceError, Root, Sources
from shared.subjects import Subjects
from tests.conductor import script
from tests.histories import FOLDER

GRAPH: Final = (Root("fam.graph"),)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source))
        for above in path.relative_to(folder).parents[:-1]:
            if not (folder / above / "__init__.py").exists():
                (folder / above / "__init__.py").write_text("")


def changes(folder: Path, files: dict[str, str], roots: tuple[Root, ...] = GRAPH) -> bool:
    """Whether editing it changes the digest."""
    digest = []
    for word in ("EDITED", "edited"):
        write(folder, {name: source.replace("EDITED", repr(word)) for name, source in files.items()})
        digest.append(Sources(folder).closure(roots).digest)
    return digest[0] != digest[1]


F = "def f(): return EDITED\ndef g(): return 0\n"
"""A module of which `f` is edited."""


# ---- imports -------------------------------------------------------------------------------------
def test_a_plan_is_reached(tmp_path: Path) -> None:
    assert changes(tmp_path, {"fam/graph.py": "def plan(): return EDITED"})


def test_a_function_that_is_imported_and_used_is_reached(tmp_path: Path) -> None:
    assert changes(tmp_path, {"fam/graph.py": "from fam.a import f\ndef plan(): return f()", "fam/a.py": F})


def test_a_function_beside_it_is_not_reached(tmp_path: Path) -> None:
    assert not changes(
        tmp_path, {"fam/graph.py": "from fam.a import g\ndef plan(): return g()", "fam/a.py": F}
    )


def test_what_is_reached_reaches_on(tmp_path: Path) -> None:
    files = {
        "fam/graph.py": "from shared.a import a\ndef plan(): return a()",
        "shared/a.py": "from shared.b import b\ndef a(): return b()",
        "shared/b.py": "from conductor.c import f\ndef b(): return inner()\ndef inner(): return f()",
        "conductor/c.py": F,
    }
    assert changes(tmp_path, files)


def test_a_cycle_of_imports_is_gone_through_once(tmp_path: Path) -> None:
    files = {
        "fam/graph.py": "from fam.a import a\ndef plan(): return a()\ndef f(): return EDITED",
        "fam/a.py": "from fam import graph\ndef a(): return graph.f()",
    }
    assert changes(tmp_path, files, (Root("fam.graph", ("plan",)),))


@pytest.mark.parametrize("used", ["f", "g"])
@pytest.mark.parametrize(
    ("imports", "use"),
    [
        ("import fam.a", "fam.a.NAME"),
        ("import fam.b, fam.a", "fam.a.NAME"),
        ("import fam.a as m", "m.NAME"),
        ("from fam import a", "a.NAME"),
        ("from fam import a as m", "m.NAME"),
        ("from . import a", "a.NAME"),
        ("from .a import NAME as h", "h"),
        ("from importlib import import_module", "import_module('fam.a').NAME"),
    ],
)
def test_every_way_to_import_a_name_is_followed(tmp_path: Path, imports: str, use: str, used: str) -> None:
    graph = f"{imports}\ndef plan(): return {use}".replace("NAME", used)
    is_by_name = "import_module" in imports or "fam.a" in use  # then the whole module is taken
    files = {"fam/graph.py": graph, "fam/a.py": F, "fam/b.py": ""}
    assert changes(tmp_path, files) is (used == "f" or is_by_name)


def test_what_a_root_imports_and_does_not_use_is_not_reached(tmp_path: Path) -> None:
    assert not changes(tmp_path, {"fam/graph.py": "from fam.a import f\nfrom fam import a", "fam/a.py": F})


def test_an_import_in_a_function_counts(tmp_path: Path) -> None:
    files = {
        "fam/graph.py": """
            def plan():
                from fam.a import f
                import fam.b as m
                return f, m.g
        """,
        "fam/a.py": F,
        "fam/b.py": "def f(): return 0\ndef g(): return 0",
    }
    assert changes(tmp_path, files)
    files["fam/a.py"], files["fam/b.py"] = files["fam/b.py"], F
    assert not changes(tmp_path, files)


def test_a_module_used_as_a_value_is_reached_whole(tmp_path: Path) -> None:
    graph = "from fam import a\ndef plan(name): return getattr(a, name)()"
    assert changes(tmp_path, {"fam/graph.py": graph, "fam/a.py": F})


def test_a_module_imported_by_a_literal_name_is_reached_whole(tmp_path: Path) -> None:
    graph = "from importlib import import_module\ndef plan(): return import_module('fam.a')"
    assert changes(tmp_path, {"fam/graph.py": graph, "fam/a.py": F})


def test_a_name_is_found_through_a_star(tmp_path: Path) -> None:
    graph = "from fam.a import *\ndef plan(): return f()"
    assert changes(tmp_path, {"fam/graph.py": graph, "fam/a.py": F})


def test_a_re_export_is_followed_to_where_it_is_defined(tmp_path: Path) -> None:
    files = {
        "fam/graph.py": "from fam.p import h\ndef plan(): return h()",
        "fam/p/__init__.py": "from fam.p.a import f as h, g",
        "fam/p/a.py": F,
    }
    assert changes(tmp_path, files)
    files["fam/p/__init__.py"] = "from fam.p.a import f, g as h"
    assert not changes(tmp_path, files)


def test_a_re_export_by_a_star_is_followed(tmp_path: Path) -> None:
    files = {
        "fam/graph.py": "from fam.p import f\ndef plan(): return f()",
        "fam/p/__init__.py": "from fam.p.a import *",
        "fam/p/a.py": F,
    }
    assert changes(tmp_path, files)


def test_a_function_that_has_its_modules_name_is_the_function(tmp_path: Path) -> None:
    files = {
        "fam/graph.py": "from fam.p import f\ndef plan(): return f()",
        "fam/p/__init__.py": "from fam.p.f import f",
        "fam/p/f.py": "def f(): return 0\ndef g(): return EDITED",
    }
    assert not changes(tmp_path, files)


def test_a_name_that_a_module_makes_when_asked_takes_the_whole_module(tmp_path: Path) -> None:
    files = {
        "fam/graph.py": "from fam.a import h\ndef plan(): return h()",
        "fam/a.py": F + "def __getattr__(name): return globals()['f']",
    }
    assert changes(tmp_path, files)


def test_a_folder_without_init_is_a_package_too(tmp_path: Path) -> None:
    files = {"fam/graph.py": "from fam.space.a import f\ndef plan(): return f()", "fam/space/a.py": F}
    write(tmp_path, files)
    (tmp_path / "fam/space/__init__.py").unlink()
    path = tmp_path / "fam/space/a.py"
    before = Sources(tmp_path).closure(GRAPH).digest
    path.write_text(path.read_text().replace("EDITED", "1"))
    assert Sources(tmp_path).closure(GRAPH).digest != before


def test_others_packages_are_not_followed_but_where_a_name_is_from_counts(tmp_path: Path) -> None:
    graph = "from numpy import f\ndef plan(): return f()"
    assert not changes(tmp_path, {"fam/graph.py": graph, "numpy/__init__.py": F})
    before = Sources(tmp_path).closure(GRAPH)
    write(tmp_path, {"fam/graph.py": graph.replace("numpy", "scipy")})
    after = Sources(tmp_path).closure(GRAPH)
    assert before.statements == after.statements
    assert before.digest != after.digest


def test_a_familys_own_package_is_followed_and_another_familys_is_not(tmp_path: Path) -> None:
    graph = "from fam.a import f\nfrom other.a import g\ndef plan(): return f(), g()"
    assert changes(tmp_path / "1", {"fam/graph.py": graph, "fam/a.py": F, "other/a.py": ""})
    other = "def g(): return EDITED"
    assert not changes(tmp_path / "2", {"fam/graph.py": graph, "fam/a.py": "f = 0", "other/a.py": other})


def test_a_name_more_in_an_import_changes_nothing(tmp_path: Path) -> None:
    files = {"fam/graph.py": "from fam.a import a\ndef plan(): return a()", "fam/b.py": "x = y = 0"}
    write(tmp_path, files | {"fam/a.py": "from fam.b import x\ndef a(): return x"})
    before = Sources(tmp_path).closure(GRAPH).digest
    write(tmp_path, {"fam/a.py": "from fam.b import x, y\n\n\ndef a(): return x\n\ndef h(): return y"})
    assert Sources(tmp_path).closure(GRAPH).digest == before


# ---- types ---------------------------------------------------------------------------------------
TYPED = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fam.a import f\n"


def test_an_import_for_types_alone_does_not_count(tmp_path: Path) -> None:
    graph = TYPED + "def plan(x: 'f') -> 'f': return x"
    assert not changes(tmp_path, {"fam/graph.py": graph, "fam/a.py": F})


def test_the_other_branch_of_an_import_for_types_counts(tmp_path: Path) -> None:
    graph = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    f = None\nelse:\n    from fam.a import f\n"
    )
    assert changes(tmp_path, {"fam/graph.py": graph + "def plan(): return f()", "fam/a.py": F})


@pytest.mark.parametrize(
    "annotation", ["A", "'A'", "list['A']", "'list[A] | None'", "Annotated['A', 1]", "Literal['x'] | A"]
)
def test_an_annotation_is_a_use(tmp_path: Path, annotation: str) -> None:
    graph = "from fam.a import A\ndef plan(): return S\nclass S:\n    x: " + annotation
    files = {"fam/graph.py": graph, "fam/a.py": "class A:\n    x = EDITED"}
    assert changes(tmp_path, files, (Root("fam.graph", ("plan",)),))


# ---- one module ----------------------------------------------------------------------------------
REACHED = {
    "a constant": "X = EDITED\ndef plan(): return X",
    "a constant of a constant": "Y = EDITED\nX = Y + 1\ndef plan(): return X",
    "one of a tuple": "X, (Z, *Y) = EDITED, (1, 2)\ndef plan(): return Y",
    "an annotated constant": "X: int = EDITED\ndef plan(): return X",
    "a constant that is added to": "X = 1\nX += EDITED\ndef plan(): return X",
    "an attribute that is set": "def plan(): return 1\nplan.x = EDITED",
    "an item that is set": "X = {}\nX[1] = EDITED\ndef plan(): return X",
    "a name bound within an expression": "X = (Y := EDITED)\ndef plan(): return Y",
    "a decorator": "def plan(): return A\ndef d(x): return EDITED\n@d\nclass A: pass",
    "a decorator's argument": "X = EDITED\n@d(X)\ndef plan(): return 1",
    "a default": "X = EDITED\ndef plan(x=X): return x",
    "a default of a keyword": "X = EDITED\ndef plan(*, x=X): return x",
    "a base class": "class A:\n    x = EDITED\nclass B(A): pass\ndef plan(): return B",
    "a method": "class A:\n    def m(self):\n        return EDITED\ndef plan(): return A",
    "a metaclass": "class M(type):\n    x = EDITED\nclass A(metaclass=M): pass\ndef plan(): return A",
    "a class that does something": "X = []\nclass A:\n    X.append(EDITED)\ndef plan(): return X",
    "a lambda": "f = lambda: EDITED\ndef plan(): return f()",
    "a coroutine": "async def f(): return EDITED\nasync def plan(): return await f()",
    "a function in a function": "def f(): return EDITED\ndef plan():\n    def g(): return f()\n    return g",
    "an iterable of a comprehension": "f = [EDITED]\ndef plan(): return [f for f in f]",
    "what a class binds after it uses it": "f = EDITED\nclass A:\n    f = f\ndef plan(): return A",
    "a pattern": "class A:\n    x = EDITED\ndef plan(x):\n    match x:\n        case A(): return 1",
    "an exception": "class A(Exception):\n    x = EDITED\ndef plan(x):\n    try: x()\n    except A: return 1",
    "a global that a function sets": "X = 0\ndef s():\n    global X\n    X = EDITED\ndef plan(): return X",
    "a condition": "if EDITED:\n    def f(): return 1\nelse:\n    def f(): return 2\ndef plan(): return f()",
    "a loop": "X = []\nfor x in EDITED:\n    X.append(x)\ndef plan(): return X",
    "an effect": "X = []\nX.append(EDITED)\ndef plan(): return X",
    "an effect that nothing names": "import atexit\natexit.register(EDITED)\ndef plan(): return 1",
    "a definition that is noted": "X = []\n@X.append\ndef f(): return EDITED\ndef plan(): return X",
    "a definition noted by a name": (
        "X = []\ndef d(f): X.append(f)\n@d\ndef f(): return EDITED\ndef plan(): return X"
    ),
    "a subclass that is asked for": (
        "class A: pass\nclass B(A):\n    x = EDITED\ndef plan(): return A.__subclasses__()"
    ),
    "a name out of globals": "def f(): return EDITED\ndef plan(n): return globals()[n]()",
    "a name out of its module": (
        "import sys\ndef f(): return EDITED\ndef plan(n): return getattr(sys.modules[__name__], n)()"
    ),
    "a name that is evaluated": "def f(): return EDITED\ndef plan(n): return eval(n)",
    "a second definition": "def f(): return 0\ndef f(): return EDITED\ndef plan(): return f()",
    "two statements in a line": "X = [\n    1]; Y = EDITED\ndef plan(): return Y",
}
NOT_REACHED = {
    "a function": "def f(): return EDITED\ndef plan(): return 1",
    "an attribute's namesake": "def f(): return EDITED\ndef plan(x): return x.f()",
    "a keyword's namesake": "def f(): return EDITED\ndef plan(x): return x(f=1)",
    "a table": "X = {1: EDITED}\ndef plan(): return 1",
    "what runs as a script": "def plan(): return 1\nif __name__ == '__main__':\n    print(EDITED)",
    "a cached function": "from functools import cache\n@cache\ndef f(): return EDITED\ndef plan(): return 1",
    "a dataclass": (
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass A:\n    x = EDITED\n"
        "def plan(): return 1"
    ),
    "a subclass": "class A: pass\nclass B(A):\n    x = EDITED\ndef plan(): return A",
    "a comment between definitions": "# EDITED\ndef plan(): return 1",
    "a docstring that is not read": "EDITED\ndef plan(): return 1",
}
PLAN: Final = (Root("fam.graph", ("plan",)),)


@pytest.mark.parametrize("what", REACHED)
def test_a_plan_reaches(tmp_path: Path, what: str) -> None:
    assert changes(tmp_path, {"fam/graph.py": REACHED[what] + "\n"}, PLAN)


@pytest.mark.parametrize("what", REACHED)
def test_a_plan_reaches_through_an_import(tmp_path: Path, what: str) -> None:
    graph = "from fam.a import plan as inner\ndef plan(): return inner()"
    assert changes(tmp_path, {"fam/graph.py": graph, "fam/a.py": REACHED[what] + "\n"}, PLAN)


@pytest.mark.parametrize("what", NOT_REACHED)
def test_a_plan_does_not_reach(tmp_path: Path, what: str) -> None:
    assert not changes(tmp_path, {"fam/graph.py": NOT_REACHED[what] + "\n"}, PLAN)


def test_an_effect_of_a_module_that_is_only_imported_counts(tmp_path: Path) -> None:
    files = {
        "fam/graph.py": "from fam.a import g\ndef plan(): return g()",
        "fam/a.py": "import fam.b\ndef g(): return 1",
        "fam/b.py": "import os\nos.environ.setdefault('x', EDITED)\ndef f(): return 1",
    }
    assert changes(tmp_path, files)


def test_an_effect_of_a_package_above_counts(tmp_path: Path) -> None:
    graph = "def plan(): return 1"
    assert changes(tmp_path, {"fam/graph.py": graph, "fam/__init__.py": "print(EDITED)"})


def test_what_is_done_to_another_modules_class_counts(tmp_path: Path) -> None:
    files = {
        "fam/graph.py": "from fam.a import A\nimport fam.b\ndef plan(): return A()",
        "fam/a.py": "class A: pass",
        "fam/b.py": "from fam.a import A\ndef f(self): return EDITED\nA.m = f",
    }
    assert changes(tmp_path, files)


def test_the_order_of_statements_counts(tmp_path: Path) -> None:
    write(tmp_path, {"fam/graph.py": "X = []\nX.append(1)\nX.append(2)"})
    before = Sources(tmp_path).closure(GRAPH).digest
    write(tmp_path, {"fam/graph.py": "X = []\nX.append(2)\nX.append(1)"})
    assert Sources(tmp_path).closure(GRAPH).digest != before


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    write(tmp_path, {"fam/graph.py": "def plan(): return 1"})
    sources = Sources(tmp_path)
    before = sources.closure(GRAPH).digest
    assert sources.closure(GRAPH).digest == before
    write(tmp_path, {"fam/graph.py": "def plan(): return 1 + 1"})
    assert sources.closure(GRAPH).digest != before


# ---- what is not there ---------------------------------------------------------------------------
def test_a_missing_module_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"fam/graph.py": "from fam.a import f\ndef plan(): return f()"})
    with pytest.raises(MissingSourceError, match=r"the source of fam\.a is needed"):
        Sources(tmp_path).closure(GRAPH)


def test_a_module_without_source_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"fam/graph.py": "from fam.a import f\ndef plan(): return f()", "fam/a.py": "def f(): 1"})
    path = tmp_path / "fam/a.py"
    py_compile.compile(str(path), str(path.with_suffix(".pyc")))
    path.unlink()
    with pytest.raises(MissingSourceError, match=r"the source of fam\.a is needed .* with sources"):
        Sources(tmp_path).closure(GRAPH)


def test_a_source_that_is_none_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"fam/graph.py": "def plan(:"})
    with pytest.raises(MissingSourceError, match=r"fam/graph\.py is not readable as Python"):
        Sources(tmp_path).closure(GRAPH)


def test_a_module_that_may_be_missing_counts_once_it_is_there(tmp_path: Path) -> None:
    graph = "try:\n    from fam.a import f\nexcept ImportError:\n    f = None\ndef plan(): return f"
    write(tmp_path, {"fam/graph.py": graph})
    before = Sources(tmp_path).closure(GRAPH).digest
    write(tmp_path, {"fam/a.py": "def f(): return 1"})
    assert Sources(tmp_path).closure(GRAPH).digest != before


@pytest.mark.processes
def test_a_zip_has_no_sources_to_be_read_and_that_is_said(tmp_path: Path) -> None:
    write(tmp_path / "fam_in_zip", {"zipped_family/graph.py": "def plan(): return 1"})
    packed = shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "fam_in_zip")
    code = (
        f"import sys; sys.path.insert(0, {packed!r})\n"
        "from shared.source_digest import Root, digest\n"
        "digest((Root('zipped_family.graph'),))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingSourceError" in done.stderr
    assert "zipped_family" in done.stderr


# ---- the real thing ------------------------------------------------------------------------------
ROOT: Final = Path(registry.__file__).parents[1]
ORPHEUS: Final = registry.plan_roots("orpheus")
DECODER: Final = registry.plan_roots("decoder_lm")
REAL: Final = {"core": digests.CORE, "fold": digests.FOLD, "decoder_lm": DECODER, "orpheus": ORPHEUS}


BEFORE: Final = {name: Sources(ROOT).closure(roots).digest for name, roots in REAL.items()}


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's sources, elsewhere."""
    folder = tmp_path_factory.mktemp("copied")
    for package in ("configs", "conductor", "gateway", "models", "shared"):
        for source in (ROOT / package).rglob("*.py"):
            copy = folder / source.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
    return folder


@pytest.fixture(scope="module")
def sources(copied: Path) -> Sources:
    return Sources(copied)


def file_of(folder: Path, module: str) -> Path:
    path = folder / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def edited(source: str, definition: ast.stmt) -> str:
    """The source with one statement more in the body of a function or class."""
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    lines, first = source.split("\n"), definition.body[0]
    line = lines[first.lineno - 1]
    inserted = "pass; " if first.lineno == definition.lineno else "pass\n" + " " * first.col_offset
    lines[first.lineno - 1] = line[: first.col_offset] + inserted + line[first.col_offset :]
    return "\n".join(lines)


def changed_by(sources: Sources, folder: Path, module: str, source: str) -> set[str]:
    """Whose digests change by another source of one module."""
    path = file_of(folder, module)
    original = path.read_text()
    path.write_text(source)
    try:
        return {name for name, roots in REAL.items() if sources.closure(roots).digest != BEFORE[name]}
    finally:
        path.write_text(original)


def definitions(folder: Path, module: str) -> dict[str, ast.stmt]:
    tree = ast.parse(file_of(folder, module).read_text())
    return {
        one.name: one
        for one in tree.body
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


@cache
def reached_names() -> dict[str, frozenset[str]]:
    return {name: Sources(ROOT).closure(roots).names for name, roots in REAL.items()}


def reached_modules() -> list[str]:
    return sorted({module for roots in REAL.values() for module in Sources().closure(roots).modules})


@pytest.mark.slow
@pytest.mark.parametrize("module", reached_modules())
def test_editing_a_definition_changes_the_digests_that_reach_it_and_no_other(
    copied: Path, sources: Sources, module: str
) -> None:
    source = file_of(copied, module).read_text()
    for name, definition in definitions(copied, module).items():
        reached = {one for one, names in reached_names().items() if f"{module}.{name}" in names}
        assert changed_by(sources, copied, module, edited(source, definition)) == reached, name


@pytest.mark.parametrize(
    ("module", "name", "whose"),
    [
        ("models.decoder_lm.graph", "new_token_budget", {"decoder_lm", "orpheus"}),
        ("models.decoder_lm.graph", "plan", {"decoder_lm"}),
        ("models.orpheus.graph", "_speech", {"orpheus"}),
        ("shared.walks.compiler", "compile_walk", {"decoder_lm", "orpheus"}),
        ("shared.events.digests", "digest_of", {"core", "fold", "decoder_lm", "orpheus"}),
        ("shared.walks.language", "describe", {"core", "fold", "decoder_lm", "orpheus"}),
        ("conductor.core.react", "Reactor", {"core", "fold"}),
        ("conductor.core.schedule", "derived_seed", {"core", "fold"}),
        ("conductor.core.snapshot", "load", {"fold"}),
        ("conductor.core.replay", "differences", set()),
        ("conductor.process", "run", set()),
        ("conductor.deployment", "deployment_of", set()),
        ("models.registry", "graph", {"fold"}),
        ("models.registry", "plan_digest", set()),
        ("models.orpheus.processing", "load", set()),
        ("gateway.requests.submission", "encode_or_refuse", set()),
        ("configs.deployment", "DeploymentConfig", set()),
    ],
)
def test_a_pin_is_of_what_it_depends_on(
    copied: Path, sources: Sources, module: str, name: str, whose: set[str]
) -> None:
    definition = definitions(copied, module)[name]
    source = edited(file_of(copied, module).read_text(), definition)
    assert changed_by(sources, copied, module, source) == whose


def test_a_function_in_a_new_folder_of_the_core_is_reached_once_the_fold_imports_it(copied: Path) -> None:
    cluster = copied / "conductor/core/cluster.py"
    original = cluster.read_text()
    new = copied / "conductor/core/deeper/still/new.py"
    try:
        write(copied, {"conductor/core/deeper/still/new.py": "def decide(): return 1\n"})
        found = [Sources(copied).closure(digests.CORE).digest]
        call = "        from conductor.core.deeper.still.new import decide\n\n        decide()\n"
        verb = '        """Fold one record of the log. Records are folded in order."""\n'
        assert verb in original
        cluster.write_text(original.replace(verb, verb + call))
        found.append(Sources(copied).closure(digests.CORE).digest)
        new.write_text("def decide(): return 2\n")
        found.append(Sources(copied).closure(digests.CORE).digest)
        assert len(set(found)) == 3
    finally:
        cluster.write_text(original)
        shutil.rmtree(copied / "conductor/core/deeper")


def test_a_family_of_another_package_is_pinned_with_what_it_takes_of_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `graph` may be a package, and only pass the graph on."""
    monkeypatch.syspath_prepend(tmp_path)
    package = {"guests_family": "guests_family.models.one"}
    monkeypatch.setattr(registry, "families", lambda: package)
    found = []
    for number in (1, 2):
        source = f"from guests_family import tools\ndef plan(): return tools.use({number})\nGRAPH = plan"
        write(
            tmp_path,
            {
                "guests_family/models/one/graph/__init__.py": "from .plan import GRAPH",
                "guests_family/models/one/graph/plan.py": source,
                "guests_family/tools.py": ("from models.decoder_lm.graph import new_token_budget as use"),
            },
        )
        closure = Sources().closure(registry.plan_roots("guests_family"))
        assert "models.decoder_lm.graph.new_token_budget" in closure.names
        assert "models.decoder_lm.graph.plan" not in closure.names
        found.append(closure.digest)
    assert found[0] != found[1]


def test_a_copy_has_the_digests_of_what_is_installed(sources: Sources) -> None:
    for roots in REAL.values():
        assert sources.closure(roots).digest == Sources().closure(roots).digest
    assert digests.core_digest() == sources.closure(digests.CORE).digest
    assert registry.plan_digest("orpheus") == sources.closure(ORPHEUS).digest


@pytest.mark.slow
def test_all_that_runs_in_a_fold_is_reached() -> None:
    """As a profiler sees it, of every recorded history and of a snapshot."""
    ran: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        is_ours = path.is_relative_to(ROOT) and ".venv" not in path.parts
        if event == "call" and is_ours and not code.co_qualname.startswith("<"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            ran.add(f"{module}.{code.co_qualname.partition('.')[0]}")

    subjects = Subjects("ds")
    records = [bundle_file.read(str(path)).records for path in sorted(FOLDER.glob("*.bundle"))]
    assert records
    registry.graph.cache_clear()
    sys.setprofile(note)
    try:
        for history in records:
            cluster = Cluster(registry.graph, subjects)
            for record in history:
                cluster.fold(record)
            cluster.schedule(script.deployment())
            cluster.outstanding()
            snapshot.load(b"".join(snapshot.pieces(cluster)), registry.graph, subjects)
    finally:
        sys.setprofile(None)
    reached = {name for roots in REAL.values() for name in Sources().closure(roots).names}
    ours = {name for name in ran if not name.startswith(("tests.", "dalsegno."))}
    assert len(ours) > 50
    assert ours <= reached


@pytest.mark.processes
def test_no_module_is_imported_to_find_its_source() -> None:
    code = (
        "import sys\n"
        "from shared.source_digest import Root, digest\n"
        "digest((Root('conductor.core.cluster', ('Cluster',)), Root('models.orpheus.graph')))\n"
        "print(*sorted(n for n in sys.modules if n.startswith(('conductor', 'shared', 'torch'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["shared", "shared.errors", "shared.source_digest"]
