"""Families of other packages: found by their entry points, detected by their claims, isolated when broken."""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Final

import pytest

from configs import checks
from models import base, registry
from models.checkpoints import files
from models.legacy_imports import ALIASES
from models.registry import AmbiguousFamilyError, UnknownFamilyError
from models.text import guiding
from shared import walks
from shared.source_digest import Sources
from tests.tiny import tiny_checkpoint

SHOUT: Final = Path(__file__).parents[2] / "docs" / "examples" / "shout"
GRAPH: Final = """
from models.base import EngineKind, ModelGraph
from models.checkpoints.claims import Claim
from shared.plans import Finish
from shared.events import Usage
from shared.walks import CLIENT, Edge, Node, compile_walk

def plan(request):
    yield
    return Finish(usage=Usage(), finish_reasons=("stop",))

def claims(checkpoint):
    return {claim}

GRAPH = ModelGraph(
    family="{family}",
    nodes={{"node": EngineKind.CPU}},
    walks={{"walk": compile_walk("walk", Node("node", (), [Edge("text", to=CLIENT("text"))]))}},
    plan=plan,
    {field}
)
"""
OLD_PATHS: Final = """
from shared.models.base import EngineKind, ModelGraph
from shared.models import checkpoint
from shared.walks import CLIENT, Edge, Node, compile_walk
import shared.models.text_decoder

def plan(request):
    yield checkpoint.CheckpointError
    return shared.models.text_decoder.TextDecoders

GRAPH = ModelGraph(
    family="older",
    nodes={"node": EngineKind.CPU},
    walks={"walk": compile_walk("walk", Node("node", (), [Edge("text", to=CLIENT("text"))]))},
    plan=plan,
)
"""

OLD_NAMES: Final = """
from shared.models.base import Guiding
from shared.models.registry import face
from shared.walks import Stream

def names():
    return Guiding, face, Stream
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a family as pip does: its package on the path, and its entry point."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    finders, known = list(sys.meta_path), set(sys.modules)

    def install(family: str, source: str) -> None:
        info = site / f"{family}-1.0.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {family}\nVersion: 1.0.0\n")
        (info / "entry_points.txt").write_text(f"[dalsegno.models]\n{family} = {family}_package\n")
        package = site / f"{family}_package"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "graph.py").write_text(source)

    registry.graph.cache_clear()
    yield install
    registry.graph.cache_clear()
    registry.plan_digest.cache_clear()
    sys.meta_path[:] = finders
    for name in set(sys.modules) - known:
        if name.partition(".")[0].endswith("_package") or name.startswith("shared.models"):
            del sys.modules[name]


def claiming(family: str, claim: str) -> str:
    return GRAPH.format(family=family, claim=claim, field="claims=claims")


def folder_of(path: Path, architecture: str) -> Path:
    path.mkdir()
    config = {"architectures": [architecture], "max_position_embeddings": 64}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_folder_is_served_by_the_family_of_another_package_that_claims_it(
    install: Install, tmp_path: Path
) -> None:
    is_odd = "Claim.ARCHITECTURE if checkpoint.architecture == 'OddModel' else None"
    install("odd", claiming("odd", is_odd))

    found = checks.resolve(str(folder_of(tmp_path / "odd", "OddModel")))

    assert (found.model, found.max_seq_len, found.placement) == ("odd", 64, {"node": 0})
    assert registry.family_of(tiny_checkpoint()) == "decoder_lm"


def test_the_more_specific_claim_wins(install: Install) -> None:
    install("mine", claiming("mine", "Claim.ARCHITECTURE if checkpoint.has('config.json') else None"))

    assert registry.family_of(tiny_checkpoint()) == "mine"


def test_equal_claims_are_refused_and_the_families_named(install: Install) -> None:
    install("mine", claiming("mine", "Claim.GENERIC"))

    with pytest.raises(AmbiguousFamilyError, match=r"found decoder_lm and mine; .*`model: decoder_lm`"):
        registry.family_of(tiny_checkpoint())


def test_without_a_claim_the_families_that_were_asked_are_named(install: Install, tmp_path: Path) -> None:
    install("mine", claiming("mine", "None"))

    with pytest.raises(UnknownFamilyError, match=r"found 'Odd'; .*decoder_lm \(.*, mine, .*orph"):
        registry.family_of(folder_of(tmp_path / "odd", "Odd"))


def test_a_folder_that_is_no_checkpoint_is_told_what_one_has(tmp_path: Path) -> None:
    with pytest.raises(UnknownFamilyError, match=r"expected .* config\.json, .* model_index\.json; .* read"):
        registry.family_of(tmp_path)


@pytest.mark.parametrize("config", ["{}", '{"architectures": []}', '{"architectures": [7]}'])
def test_a_checkpoint_without_an_architecture_is_claimed_by_none(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)

    with pytest.raises(UnknownFamilyError, match=r"config\.json: expected an architecture .*, found None; "):
        registry.family_of(tmp_path)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "import a_module_that_is_missing",
            "ModuleNotFoundError: No module named 'a_module_that_is_missing'",
        ),
        ("def (", "SyntaxError: "),
        ("raise RuntimeError('no good')", "RuntimeError: no good"),
        (claiming("broken", "checkpoint.missing"), "AttributeError: "),
    ],
)
def test_a_broken_family_is_named_in_a_warning_and_the_others_serve(
    install: Install, caplog: pytest.LogCaptureFixture, tmp_path: Path, source: str, why: str
) -> None:
    install("broken", source)

    with caplog.at_level(logging.WARNING):
        assert registry.family_of(tiny_checkpoint()) == "decoder_lm"

    assert f"model family 'broken' (broken_package) is ignored: {why}" in caplog.text
    with pytest.raises(UnknownFamilyError, match=r"families asked: .*decoder_lm"):
        registry.family_of(folder_of(tmp_path / "odd", "Odd"))


def test_a_family_without_a_claim_is_served_by_name(install: Install, tmp_path: Path) -> None:
    install("quiet", GRAPH.format(family="quiet", claim="None", field=""))
    folder = folder_of(tmp_path / "checkpoint", "LlamaForCausalLM")
    values = {
        "model": "quiet",
        "checkpoint": str(folder),
        "max_seq_len": 64,
        "node_groups": [{"node_names": ["node"], "ranks": [0]}],
    }

    assert registry.family_of(folder) == "decoder_lm"
    assert checks.check(values, source="x.yaml", folder=tmp_path, name="x").model == "quiet"


def test_a_family_that_imports_by_the_old_paths_is_warned_and_gets_the_same_modules(install: Install) -> None:
    install("older", OLD_PATHS)

    with pytest.warns(DeprecationWarning, match="has moved") as warned:
        graph = registry.graph("older")

    assert type(graph) is base.ModelGraph
    assert [str(one.message) for one in warned] == [
        "shared.models.base has moved: import models.base instead",
        "shared.models.checkpoint has moved: import models.checkpoints.files instead",
        "shared.models.text_decoder has moved: import models.text.detokenizer instead",
    ]
    assert all(Path(one.filename).name == "graph.py" for one in warned)
    graph_module = sys.modules["older_package.graph"]
    assert graph_module.checkpoint is files
    assert sys.modules["shared.models.base"] is base
    assert base.__spec__ is not None
    assert base.__spec__.name == "models.base"
    closure = Sources().closure(registry.plan_roots("older"))
    assert {"models.base.ModelGraph", "models.checkpoints.files.CheckpointError"} <= set(closure.names)
    assert registry.plan_digest("older") == closure.digest


def test_every_old_path_leads_to_a_module() -> None:
    assert {new for new in ALIASES.values() if not Sources().has(new)} == set()


def test_old_names_are_in_the_modules_that_are_imported_by_their_old_paths(install: Install) -> None:
    source = OLD_PATHS + OLD_NAMES
    install("older", source)

    with pytest.warns(DeprecationWarning, match="has moved|is now called"):
        registry.graph("older")

    module = sys.modules["older_package.graph"]
    assert module.Guiding is guiding.Guiding
    assert module.face is registry.module
    assert module.Stream is walks.StreamInput
    names = Sources().closure(registry.plan_roots("older")).names
    reached = {"models.text.guiding.Guiding", "models.registry.module", "shared.walks.language.StreamInput"}
    assert reached <= set(names)


def test_every_old_name_of_a_walk_leads_to_its_current_one_with_a_warning() -> None:
    for old, new in walks.RENAMED.items():
        with pytest.warns(DeprecationWarning, match=f"shared.walks.{old} is now called {new}"):
            assert getattr(walks, old) is getattr(walks, new)
    with pytest.raises(AttributeError, match=r"module 'shared\.walks' has no attribute 'Strem'"):
        getattr(walks, "Strem")  # noqa: B009 - mypy knows that there is none


def test_the_old_paths_work_without_the_registry(install: Install) -> None:
    """A family's own tests import its graph directly."""
    install("older", OLD_PATHS)

    with pytest.warns(DeprecationWarning, match=r"shared\.models\.\w+ has moved"):
        graph = import_module("older_package.graph")

    assert type(graph.GRAPH) is base.ModelGraph


def test_the_example_claims_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SHOUT)
    monkeypatch.setattr(registry, "families", lambda: {"decoder_lm": "models.decoder_lm", "shout": "shout"})

    assert checks.resolve(str(SHOUT / "checkpoint")).model == "shout"
    registry.graph.cache_clear()
