"""The faults: one process, at one point, in one of three ways.

A *kill* is SIGKILL; the supervisor restarts the role. A *stop* is SIGSTOP for longer than any heartbeat
timeout, then SIGCONT: the process resumes in a deployment that has continued without it. A *cut* removes its
connection to NATS for as long.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias

from tests.chaos.deployment import Deployment, Role
from tests.chaos.proxy import Moment
from tests.chaos.rounds import Disturbance

Action: TypeAlias = Literal["kill", "stop", "cut"]
ACTIONS: Final[Sequence[Action]] = ("kill", "stop", "cut")
FAULT_S: Final = 4.0
"""How long a process is stopped or cut off: others have given it up by then."""
TRIGGER_S: Final = 0.3
"""When something is done to have a point reached: answers are under way by then."""
_LOOK_S: Final = 0.002


def at_point(
    deployment: Deployment, armed: Sequence[Role], point: str, nth: int, action: Action
) -> Disturbance:
    """Let the first of the `armed` roles that reaches the point for the nth time fail there."""

    async def disturb() -> bool:
        for role in armed:
            role.order(point, nth, "wait" if action == "cut" else action)
        while not (reached := [role for role in armed if role.has_reached]):  # noqa: ASYNC110 - a file's
            await asyncio.sleep(_LOOK_S)
        for role in armed:
            if role not in reached:
                role.disarm()
        await _after(reached[0], action)
        return True

    return disturb


async def _after(role: Role, action: Action) -> None:
    """Continue the fault at the point: the process is killed, stopped, or waits to be cut off."""
    if action == "stop":
        pid = role.pid
        try:
            await asyncio.sleep(FAULT_S)
        finally:
            if role.pid == pid:  # else somebody took it for hung, and ended it
                role.signal(signal.SIGCONT)
    elif action == "cut":
        role.proxy.cut()
        role.disarm()  # and it goes on
        try:
            await asyncio.sleep(FAULT_S)
        finally:
            role.proxy.heal()


def at_once(role: Role, action: Action) -> Disturbance:
    """Let a role fail wherever it is."""

    async def disturb() -> bool:
        if action != "cut":
            role.signal(signal.SIGKILL if action == "kill" else signal.SIGSTOP)
        await _after(role, action)
        return True

    return disturb


def after_events(deployment: Deployment, count: int, disturb: Disturbance) -> Disturbance:
    """Apply the fault after a number of events have passed."""

    async def wait_and_disturb() -> bool:
        reached = asyncio.Event()
        passed = 0

        def watch(moment: Moment) -> None:
            nonlocal passed
            passed += moment is Moment.FORWARDED
            if passed == count:
                reached.set()

        _watch(deployment, watch)
        try:
            await reached.wait()
        finally:
            _watch(deployment, lambda _: None)
        return await disturb()

    return wait_and_disturb


def _watch(deployment: Deployment, watch: Callable[[Moment], None]) -> None:
    for role in deployment.roles.values():
        role.proxy.watch = watch


def of_the_server(deployment: Deployment, moment: Moment, nth: int, action: Action) -> Disturbance:
    """Let nats-server fail at the nth event that passes."""

    async def disturb() -> bool:
        nats, reached = deployment.nats, asyncio.Event()
        proxies = [role.proxy for role in deployment.roles.values()]
        passed = 0

        def watch(seen: Moment) -> None:
            nonlocal passed
            passed += seen is moment
            if passed != nth or seen is not moment:
                return
            reached.set()
            if action == "cut":
                for proxy in proxies:
                    proxy.cut()
            else:
                nats.signal(signal.SIGKILL if action == "kill" else signal.SIGSTOP)

        _watch(deployment, watch)
        try:
            await reached.wait()
            if action != "kill":
                await asyncio.sleep(FAULT_S)
        finally:
            if action == "stop":
                nats.signal(signal.SIGCONT)
            _watch(deployment, lambda _: None)
            for proxy in proxies:
                proxy.heal()
        return True

    return disturb


def triggered(disturb: Disturbance, trigger: Disturbance) -> Disturbance:
    """The same, with an action that makes the point reachable."""

    async def both() -> bool:
        async with asyncio.TaskGroup() as tasks:
            disturbing = tasks.create_task(disturb())
            await asyncio.sleep(TRIGGER_S)
            tasks.create_task(trigger())
        return disturbing.result()

    return both


def signalled(role: Role, number: signal.Signals, *, for_s: float = 0.0) -> Disturbance:
    """Send a signal; with `for_s`, SIGCONT after that time."""

    async def disturb() -> bool:
        role.signal(number)
        if for_s:
            await asyncio.sleep(for_s)
            role.signal(signal.SIGCONT)
        return True

    return disturb
