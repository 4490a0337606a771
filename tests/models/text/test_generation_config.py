"""Every setting of `generation_config.json` is applied, read elsewhere, harmless, or reported."""

import json
from pathlib import Path

import pytest
from transformers import GenerationConfig

from models import registry
from models.checkpoints.files import CheckpointError
from models.text.generation_config import APPLIED, HARMLESS, READ, UNAPPLIED, remarks_of
from models.text.sampling_defaults import generation_defaults
from tests.tiny import write_checkpoint

FIELDS = {name for name in vars(GenerationConfig()) if not name.startswith("_")}


def written(folder: Path, **settings: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def test_each_field_of_transformers_has_one_place() -> None:
    places = [set(APPLIED), set(READ), set(UNAPPLIED), set(HARMLESS)]
    listed = set().union(*places)

    assert sum(map(len, places)) == len(listed)
    assert not FIELDS - listed, "a newer transformers has new settings: apply or report them"


def test_what_changes_answers_and_is_not_applied_is_reported(tmp_path: Path) -> None:
    asked = {
        "forced_eos_token_id": 2,
        "typical_p": 0.9,
        "temperature": 0.5,
        "use_cache": False,
    }

    [remark] = remarks_of(written(tmp_path, **asked))

    assert "forced_eos_token_id=2, typical_p=0.9" in remark
    assert "temperature" not in remark
    assert "use_cache" not in remark


def test_neutral_values_are_not_reported(tmp_path: Path) -> None:
    assert remarks_of(tmp_path) == []
    assert remarks_of(written(tmp_path, **UNAPPLIED)) == []
    assert remarks_of(written(tmp_path, max_length=4096, suppress_tokens=[])) == []


def test_check_and_models_show_the_remark(tmp_path: Path) -> None:
    folder = written(write_checkpoint(tmp_path), forced_eos_token_id=2)
    remarks = registry.graph(registry.family_of(folder)).remarks
    assert remarks is not None

    assert remarks(folder, {}) == remarks_of(folder) != []


@pytest.mark.parametrize("strings", ["###", ["###"]])
def test_stop_strings_and_the_decay_of_the_length_are_defaults(tmp_path: Path, strings: object) -> None:
    asked = {"stop_strings": strings, "exponential_decay_length_penalty": [5, 1.2]}

    defaults = generation_defaults(written(tmp_path, **asked))

    assert (defaults.stop, defaults.length_decay) == (["###"], (5, 1.2))
    assert remarks_of(tmp_path) == []


@pytest.mark.parametrize("decay", [[5], [-1, 1.2], [5, 0], "5"])
def test_a_malformed_decay_is_refused_by_the_name_of_the_file(tmp_path: Path, decay: object) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: length_decay"):
        generation_defaults(written(tmp_path, exponential_decay_length_penalty=decay))
