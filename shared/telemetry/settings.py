"""The `traces` section of a configuration: the export of traces."""

from typing import Annotated

import msgspec
from msgspec import Meta


class TraceSettings(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The export of traces by OpenTelemetry.

    Attributes:
        endpoint: an OTLP/HTTP collector, e.g. `http://127.0.0.1:4318`, without a password; without an
            endpoint nothing is exported.
        sample_ratio: the share of traces that is recorded, unless the client decides.
    """

    endpoint: Annotated[str, Meta(pattern=r"^https?://[^\s@]+$")] | None = None
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
