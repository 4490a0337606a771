"""The bundled placements: they use only M*'s keys, and place every node as their first lines say."""

from typing import Any

import msgspec
import pytest
import yaml

from configs import placement
from configs.files import configs_folder
from models.orpheus.graph import GRAPH

LAYOUTS = {
    "orpheus": (0, 0, 0),
    "orpheus_colocated": (0, 0, 0),
    "orpheus_two_ranks": (0, 0, 1),
    "orpheus_pd_disaggregated": (0, 1, 1),
    "orpheus_three_ranks": (0, 1, 2),
}
"""The ranks of prefill, decode and SNAC."""


def written(name: str) -> dict[str, Any]:
    found = yaml.safe_load((configs_folder() / f"{name}.yaml").read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_file_places_every_node_as_described(name: str) -> None:
    groups = placement.resolve(
        msgspec.convert(written(name)["node_groups"], list[placement.NodeGroup]), GRAPH
    )
    places = placement.assign(groups, [group.ranks[0] for group in groups])

    found = (
        placement.rank_of(*places, "prefill", "LLM"),
        placement.rank_of(*places, "decode", "LLM"),
        placement.rank_of(*places, "snac_chunk", "snac_decoder"),
    )
    assert found == LAYOUTS[name]
    assert placement.rank_of(*places, "prepare", "prepare") == 0
    assert placement.ranks_of(groups) == sorted(set(LAYOUTS[name]))


@pytest.mark.parametrize("name", LAYOUTS)
def test_only_keys_of_the_published_format_are_used(name: str) -> None:
    found = written(name)

    assert set(found) == {"model", "max_seq_len", "node_groups"}
    keys = {key for group in found["node_groups"] for key in group}
    assert keys <= {"node_names", "ranks", "graph_walks"}


def test_every_placement_is_tested() -> None:
    assert {path.stem for path in configs_folder().glob("orpheus*.yaml")} == set(LAYOUTS)
