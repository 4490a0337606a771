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
        contents: record what clients ask and what they are answered, as `gen_ai.input.messages` and
            `gen_ai.output.messages`: everybody who reads the traces then reads them.
        max_content_bytes: the maximum size of each of the two; the newest messages of a chat and the first
            characters of an answer are kept.
    """

    endpoint: Annotated[str, Meta(pattern=r"^https?://[^\s@]+$")] | None = None
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    contents: bool = False
    max_content_bytes: Annotated[int, Meta(ge=256, le=1_048_576)] = 16_384
