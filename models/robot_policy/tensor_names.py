"""The names of a policy's tensors in the published layouts, and their places in the two networks. No torch.

    lerobot, openpi   [model.]paligemma_with_expert.paligemma.model.language_model.layers.0...
                      [model.]paligemma_with_expert.gemma_expert.model.layers.0...
                      [model.]action_in_proj.weight, time_mlp_in.weight, ...
    transformers      model.vlm.language_model.layers.0..., model.dit.layers.0...
                      embed_action_time.action_in_proj.weight, action_out_proj.weight

The prefix network is `PaliGemmaForConditionalGeneration`. The expert has its layers in `dit`, beside its
projections.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

from models.checkpoints.weights import Shard
from models.transformers_lm.renames import Rule

PREFIX: Final = "prefix."
EXPERT: Final = "expert."
_PLACES: Final = (
    ("paligemma_with_expert.paligemma.", PREFIX),
    ("paligemma_with_expert.gemma_expert.model.", f"{EXPERT}dit."),
    ("model.vlm.", f"{PREFIX}model."),
    ("model.dit.", f"{EXPERT}dit."),
    ("embed_action_time.", EXPERT),
)
_EMBEDDING: Final = f"{PREFIX}model.language_model.embed_tokens.weight"
_HEAD: Final = f"{PREFIX}lm_head.weight"
_UNUSED: Final = ("paligemma_with_expert.gemma_expert.lm_head.", f"{EXPERT}dit.embed_tokens.")
"""Tensors that only have a place because a language model has them: the expert reads and writes no tokens."""


def place_of(name: str) -> str:
    """The place of a stored tensor, beginning with `PREFIX` or `EXPERT`; empty for one that is not used."""
    name = (
        name.removeprefix("model.") if name.startswith("model.") and not _is_of_transformers(name) else name
    )
    for stored, place in _PLACES:
        if name.startswith(stored):
            name = place + name.removeprefix(stored)
            break
    else:
        if name.startswith(_UNUSED[0]):
            return ""
        name = EXPERT + name
    return "" if name.startswith(_UNUSED[1]) else name


def part_of(shards: Iterable[Shard], prefix: str, keep: Callable[[str], bool]) -> tuple[list[Shard], Rule]:
    """The files with some tensors of one network alone, and the rule that names them in it.

    The embeddings of the prefix are stored once: as such, or as the head's.

    Args:
        shards: the files of the checkpoint.
        prefix: `PREFIX` or `EXPERT`.
        keep: returns true for the name of a wanted tensor in the network.
    """
    shards = list(shards)
    places = {name: place_of(name) for shard in shards for name in shard.tensors}
    if _EMBEDDING in places.values():
        places = {name: place for name, place in places.items() if place != _HEAD}
    else:
        places = {name: _EMBEDDING if place == _HEAD else place for name, place in places.items()}
    own = {name: place.removeprefix(prefix) for name, place in places.items() if place.startswith(prefix)}
    own = {name: place for name, place in own.items() if keep(place)}
    kept = [
        replace(shard, tensors={name: info for name, info in shard.tensors.items() if name in own})
        for shard in shards
    ]

    def rule(name: str) -> Mapping[str, int]:
        return {own[name]: 0}

    return kept, rule


def _is_of_transformers(name: str) -> bool:
    return name.startswith(("model.vlm.", "model.dit."))
