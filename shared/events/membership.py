"""Events about processes: conductors' epochs, and workers that join, leave or are declared lost."""

from typing import Final

import msgspec

from shared.events.base import Event

MAX_LINE_CHARS: Final = 500
"""The maximum length of a process's last line."""


class ProcessEnd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of an earlier process of the same role or rank, as the launcher that watched it saw it.

    Attributes:
        pid: of the process.
        ended_ns: when it ended; Unix nanoseconds of the launcher's clock.
        status: its exit status; None if a signal ended it.
        signal: the name of that signal, such as `SIGKILL`.
        reason: why the launcher killed it; empty if it did not.
        last_line: the last line of its output, which is often an error message.
    """

    pid: int
    ended_ns: int
    status: int | None = None
    signal: str = ""
    reason: str = ""
    last_line: str = ""

    def __post_init__(self) -> None:
        if len(self.last_line) > MAX_LINE_CHARS:
            msgspec.structs.force_setattr(self, "last_line", f"{self.last_line[: MAX_LINE_CHARS - 1]}…")

    @property
    def how(self) -> str:
        """The end in words."""
        if self.signal:
            return f"killed by {self.signal}"
        return f"ended by status {self.status}"


class EpochOpened(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="epoch.opened.v1", tag_field="type"
):
    """A conductor's epoch begins. Conductor events of lower epochs stored after this event are void.

    Attributes:
        ended: the last processes before this one, which the launcher restarted. Empty without a launcher, and
            in older logs.
    """

    conductor: str
    core: str
    ended: list[ProcessEnd] = []


class WorkerJoined(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="worker.joined.v1", tag_field="type"
):
    """A rank's process starts. The event's log sequence number is the process's incarnation.

    A duplicate (same `id`) starts no second incarnation: the first one counts. A live worker repeats the
    event once a day, with its `incarnation`, because the log deletes old events.

    Attributes:
        cards: endpoint descriptors, by transport: how other workers reach this incarnation's tensors. A rank
            that follows the leader of a TP group (`tp_size`) has the entry `group`: where it waits for its
            leader.
        tool_calls: the model's format of tool calls, one of `models.text.tool_calls`; empty if the model
            cannot call tools.
        reasoning: the model's format of reasoning, one of `models.text.reasoning`; empty for one without.
        weights: the digest of everything that the rank loaded: weights, tokenizer, chat template, generation
            config. Empty for a rank that follows in a TP group, whose leader has compared them, and in logs
            that are older than the field.
        node_weights: the digest of what each node loaded.
        revision: the repository and the commit of the checkpoint on a hub, `org/name@commit`; empty for a
            folder, and in older logs.
        ended: the rank's last processes before this one, which the launcher restarted. Empty without a
            launcher, in later incarnations of a process, and in older logs.
    """

    rank: int
    model: str
    nodes: list[str]
    device: str
    kv_tokens: int = 0
    max_seq_len: int = 0
    host: str = ""
    pid: int = 0
    cards: dict[str, bytes] = {}
    tool_calls: str = ""
    weights: str = ""
    node_weights: dict[str, str] = {}
    revision: str = ""
    ended: list[ProcessEnd] = []
    reasoning: str = ""


class WorkerLeaving(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="worker.leaving.v1", tag_field="type"
):
    """A rank's process ends in order.

    Attributes:
        tool_calls, reasoning: as in `worker.joined`. Gateways still need them to parse its answers.
    """

    rank: int
    tool_calls: str = ""
    reasoning: str = ""


class WorkerLost(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="worker.lost.v1", tag_field="type"
):
    """The conductor declares a worker's `incarnation` dead, on the subject `conductor.lost`.

    Attributes:
        read_seq: the log position up to which the worker had read, by its last heartbeat.
        silent_s: the time without a heartbeat; 0 if that was not the reason, and in older logs.
    """

    rank: int
    reason: str
    read_seq: int | None = None
    silent_s: float = 0.0
