"""The LoRA adapters of a deployment as a gateway knows them: configured ones, and those of the log."""

from collections.abc import Mapping

from shared.adapters import Adapter
from shared.events import AdapterLoaded, AdapterUnloaded


class ServedAdapters:
    """A fold of the log's adapters over those of the configuration, which stay.

    Attributes:
        takes_others: adapters may be loaded at run time.
    """

    def __init__(
        self, configured: Mapping[str, Adapter] | None = None, *, takes_others: bool = False
    ) -> None:
        self.configured = dict(configured or {})
        self.takes_others = takes_others
        self._loaded: dict[str, Adapter] = {}
        self._changed: dict[str, int] = {}  # by name, the log position of its last event

    @property
    def by_name(self) -> dict[str, Adapter]:
        """All adapters that requests may name."""
        return self._loaded | self.configured if self.takes_others or self.configured else {}

    @property
    def loaded(self) -> Mapping[str, Adapter]:
        """Those that were loaded at run time."""
        return dict(self._loaded)

    def changed_at(self, name: str) -> int:
        """The log position of an adapter's last event; 0 without any."""
        return self._changed.get(name, 0)

    def begin(self) -> None:
        """Forget the log: it is read from its beginning."""
        self._loaded.clear()
        self._changed.clear()

    def fold(self, event: AdapterLoaded | AdapterUnloaded, seq: int) -> None:
        """Apply an event at its position in the log; a second copy, or an earlier one, has no effect."""
        name = event.adapter_name
        if seq <= self._changed.get(name, 0):
            return
        self._changed[name] = seq
        if isinstance(event, AdapterLoaded):
            self._loaded[name] = event.adapter
        else:
            self._loaded.pop(name, None)
