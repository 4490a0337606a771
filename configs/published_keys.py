"""Keys of published configurations that have no counterpart here: left out, with a logged warning. Pure."""

from collections.abc import Mapping
from typing import Any, Final

KV_CACHE: Final = "kv_cache"
MODEL_KWARGS: Final = "model_kwargs"
_NO_CACHE: Final = "this model keeps no keys and values between its steps"
_OF_ALL: Final[Mapping[str, Mapping[str, str]]] = {
    KV_CACHE: {
        "cpu_offload_pages": "keys and values stay on their device; what has no room is computed again later"
    }
}
_OF_MODELS: Final[Mapping[str, Mapping[str, Mapping[str, str]]]] = {
    "cosmos3": {
        KV_CACHE: {"max_num_pages": _NO_CACHE},
        MODEL_KWARGS: dict.fromkeys(
            ("cuda_graph", "graph_max_latent_area"), "steps are not recorded as CUDA graphs"
        ),
    },
}
"""By model, section and key, the reason."""


def without_counterparts(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a configuration without the keys that M* has and we do not, and why by dotted key.

    A key that is not known stays, and is refused with all others that are unknown.
    """
    kept, why = dict(raw), dict[str, str]()
    model = raw.get("model")
    of_model = _OF_MODELS.get(model, {}) if isinstance(model, str) else {}
    for section in (KV_CACHE, MODEL_KWARGS):
        given = raw.get(section)
        reasons = {**_OF_ALL.get(section, {}), **of_model.get(section, {})}
        if not isinstance(given, dict) or not given.keys() & reasons.keys():
            continue
        rest = {key: value for key, value in given.items() if key not in reasons}
        if section == KV_CACHE and rest:
            continue
        why |= {f"{section}.{key}": reasons[key] for key in given if key in reasons}
        if section == KV_CACHE:
            del kept[section]
        else:
            kept[section] = rest
    return kept, why
