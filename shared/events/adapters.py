"""Events about LoRA adapters: loaded into a deployment, and unloaded from it, at run time."""

from typing import Annotated

from msgspec import Meta

from shared.adapters import NAME_PATTERN, Adapter
from shared.events.base import Event


class AdapterLoaded(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="adapter.loaded.v1", tag_field="type"
):
    """From here on, the adapter's name stands for these weights.

    Requests that were submitted before keep theirs.
    """

    adapter: Adapter

    @property
    def adapter_name(self) -> str:
        return self.adapter.name


class AdapterUnloaded(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="adapter.unloaded.v1", tag_field="type"
):
    """From here on, no adapter has this name. Requests that were submitted before keep theirs."""

    name: Annotated[str, Meta(pattern=NAME_PATTERN)]

    @property
    def adapter_name(self) -> str:
        return self.name
