"""The kill matrix: every role, at every point, with every fault."""

import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from shared.faults import POINTS
from tests.chaos.deployment import Deployment, Role
from tests.chaos.disturbances import ACTIONS, FAULT_S, Action, at_point, of_the_server, signalled, triggered
from tests.chaos.proxy import Moment
from tests.chaos.questions import LEAVER, Question
from tests.chaos.rounds import DISTURBED_S, Disturbance

_NTH: Final = {
    "gateway.chunk.relayed": 6,
    "gateway.submission.acked": 2,
    "conductor.record.read": 16,
    "conductor.decision.made": 12,
    "conductor.decision.posted": 12,
    "conductor.decision.acked": 12,
    "worker.order.read": 3,
    "worker.node.started": 3,
    "worker.token.computed": 60,
    "worker.chunk.posted": 6,
    "worker.chunk.acked": 6,
}
"""The time a point is passed at which something is under way; the first, where none is named."""
_SERVER_POINTS: Final = {
    "nats.event.forwarding": (Moment.FORWARDING, "an event is about to reach the server"),
    "nats.event.forwarded": (Moment.FORWARDED, "an event was handed to the server's socket"),
    "nats.event.acking": (Moment.ACKING, "an ack is about to reach its writer"),
}
_SERVER_NTH: Final = 40
_MOST_OF_THE_SERVER: Final = 150
_BY_ANOTHER: Final = ("conductor.claim.", "conductor.lost.", "worker.joined.", "worker.leaving.")
"""Points that are reached because something else was done, here to begin with."""
_LEAVERS: Final = 4
_NEEDS_LEAVERS: Final = frozenset(
    {"gateway.cancel.publishing", "gateway.cancel.published", "worker.stop.read"}
)
ALL_POINTS: Final = {**POINTS, **{name: meaning for name, (_, meaning) in _SERVER_POINTS.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One role at one point, with one fault.

    Attributes:
        nth: the occurrence of the point at which the fault happens; 0 is the default.
    """

    point: str
    action: Action
    nth: int = 0

    @property
    def name(self) -> str:
        nth = f"-{self.nth}" if self.nth else ""
        return f"{self.point.replace('.', '-')}{nth}-{self.action}"

    @property
    def role(self) -> str:
        return self.point.partition(".")[0]

    def command(self, *flags: str) -> str:
        """The command that repeats it on a deployment of the same shape."""
        role, _, point = self.point.partition(".")
        nth = ["--nth", str(self.nth)] if self.nth else []
        args = ["--role", role, "--point", point, "--action", self.action, *nth, *flags]
        return f'make chaos ARGS="{" ".join(args)}"'

    @property
    def patience_s(self) -> float:
        """The time after which it is given up once all clients are served; long if something has to start."""
        return DISTURBED_S if self.point.startswith(_BY_ANOTHER) else 2 * FAULT_S

    def questions(self, lasting: Sequence[Question]) -> list[Question]:
        """The requests of its round: clients that leave come first, because the first gateway is hurt."""
        leavers = [LEAVER] * _LEAVERS if self.point in _NEEDS_LEAVERS else []
        return [*leavers, *lasting]

    def disturbance(self, deployment: Deployment) -> Disturbance:
        """The fault of its round."""
        if self.point in _SERVER_POINTS:
            moment, _ = _SERVER_POINTS[self.point]
            return of_the_server(deployment, moment, self.nth or _SERVER_NTH, self.action)
        leader = deployment.leader
        assert leader is not None, "a deployment that is ready has a leader"
        armed = self._armed(deployment, leader)
        disturb = at_point(deployment, armed, self.point, self.nth or _NTH.get(self.point, 1), self.action)
        trigger = self._trigger(deployment, leader)
        return disturb if trigger is None else triggered(disturb, trigger)

    def _armed(self, deployment: Deployment, leader: Role) -> list[Role]:
        if self.point.startswith("conductor.claim."):
            return deployment.of("conductor")  # whoever is the next to lead
        return {
            "gateway": [deployment.roles["gateway-0"]],
            "conductor": [leader],
            "worker": [deployment.roles["worker-0"]],
        }[self.role]

    def _trigger(self, deployment: Deployment, leader: Role) -> Disturbance | None:
        worker = deployment.roles["worker-0"]
        if self.point.startswith("conductor.claim."):
            return signalled(leader, signal.SIGKILL)
        if self.point.startswith("worker.joined."):
            return signalled(worker, signal.SIGKILL)
        if self.point == "worker.leaving.posting":
            return signalled(worker, signal.SIGTERM)
        if self.point == "conductor.lost.posted":
            return signalled(worker, signal.SIGSTOP, for_s=FAULT_S)
        return None


def cells(
    role: str | None = None, point: str | None = None, action: str | None = None, nth: int = 0
) -> Iterator[Cell]:
    """The cells of the matrix; optionally of one role, one action, and points whose name contains `point`."""
    for name in ALL_POINTS:
        of_role, _, rest = name.partition(".")
        for one in ACTIONS:
            if role in {None, of_role} and (point is None or point in rest) and action in {None, one}:
                yield Cell(point=name, action=one, nth=nth)


def at_random(seed: int) -> Cell:
    """A random cell of a frequent point, at a random occurrence."""
    chance = random.Random(seed)
    point = chance.choice([*_NTH, *_SERVER_POINTS])
    most = _MOST_OF_THE_SERVER if point in _SERVER_POINTS else 2 * _NTH.get(point, 1)
    return Cell(point=point, action=chance.choice(ACTIONS), nth=chance.randint(1, most))
