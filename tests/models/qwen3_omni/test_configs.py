"""The bundled placements are M*'s, key by key."""

from typing import Any

import msgspec
import pytest
import yaml

from configs import placement
from configs.files import configs_folder, read
from models.qwen3_omni.graph import GRAPH
from tests.tiny.omni import tiny_omni

PLACES = {
    "qwen3_omni": {"audio_encoder": 1, "vision_encoder": 1, "Thinker": 1, "Talker": 0, "Code2Wav": 0},
    "qwen3omni_2gpu": {"audio_encoder": 1, "vision_encoder": 1, "Thinker": 1, "Talker": 0, "Code2Wav": 0},
    "qwen3omni": {"audio_encoder": 0, "vision_encoder": 0, "Thinker": 1, "Talker": 2, "Code2Wav": 0},
    "qwen3omni_colocated": dict.fromkeys(
        ("audio_encoder", "vision_encoder", "Thinker", "Talker", "Code2Wav"), 0
    ),
    "qwen3omni_thinker_tp2": {
        "audio_encoder": 0,
        "vision_encoder": 0,
        "Thinker": 0,
        "Talker": 2,
        "Code2Wav": 2,
    },
}
"""The rank of each node; of a group that shares one, the first."""


def groups_of(name: str) -> list[placement.NodeGroup]:
    found: dict[str, Any] = yaml.safe_load((configs_folder() / f"{name}.yaml").read_text())
    assert (set(found), found["model"], found["max_seq_len"]) == (
        {"model", "max_seq_len", "node_groups"},
        "qwen3_omni",
        32_768,
    )
    return msgspec.convert(found["node_groups"], list[placement.NodeGroup])


@pytest.mark.parametrize("name", PLACES)
def test_each_file_places_every_node_as_described(name: str) -> None:
    groups = placement.resolve(groups_of(name), GRAPH)
    found, _ = placement.assign(groups, [group.ranks[0] for group in groups])
    assert {node: rank for node, rank in found.items() if node != "prepare"} == PLACES[name]


def test_every_placement_is_tested() -> None:
    assert {path.stem for path in configs_folder().glob("qwen3*omni*.yaml")} == set(PLACES)


def test_a_thinker_that_prefills_and_decodes_on_different_ranks_is_refused_by_name() -> None:
    prompts = ["prefill_text", "prefill_audio", "prefill_vision"]
    of_m_star = [
        {"node_names": ["audio_encoder", "vision_encoder", "Code2Wav"], "ranks": [0]},
        {"node_names": ["Thinker"], "ranks": [0], "graph_walks": prompts},
        {"node_names": ["Thinker"], "ranks": [1], "graph_walks": ["thinker_decode"]},
        {"node_names": ["Talker"], "ranks": [2]},
    ]
    groups = msgspec.convert(of_m_star, list[placement.NodeGroup])
    with pytest.raises(placement.PlacementError, match=r"no node_group places node 'Thinker' in .*speak_"):
        placement.resolve(groups, GRAPH)


def test_a_folder_is_served_with_the_length_of_its_thinker() -> None:
    base = read(str(tiny_omni()))
    assert (base.values["model"], base.values["max_seq_len"]) == ("qwen3_omni", 4096)
