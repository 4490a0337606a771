"""What a process has counted, as its beats tell it: under `meters`, beside the facts `/health` shows.

Totals since the process began, so that a beat that is lost loses nothing. A gateway shows the last ones it
heard at `/metrics`; there a total that begins anew is a process that was started again.
"""

import msgspec

from shared.histogram import Histogram
from shared.log.port import LogStats


class WorkerMeters(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's.

    Attributes:
        sequences: how many the engine has taken into its batches.
        computed_tokens: positions that were run through the model, prompts' and answers'.
        sampled_tokens: tokens that came out of it.
        batch_rows: sequences in a step; `step_s` what it took, from choosing them to having their tokens.
    """

    log: LogStats
    sequences: int
    computed_tokens: int
    sampled_tokens: int
    batch_rows: Histogram
    step_s: Histogram


class ConductorMeters(msgspec.Struct, frozen=True, kw_only=True):
    """A conductor's.

    Attributes:
        folded: events it has read from the log and folded, the log's whole past included.
        decisions: decisions it has published.
    """

    log: LogStats
    folded: int
    decisions: int
