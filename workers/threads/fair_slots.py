"""Slots for concurrent work that tenants share fairly. Pure asyncio, for one event loop.

A free slot goes to the waiting tenant that has used the least time, and among its waiting callers to the
first. A tenant that comes back starts at the least of those present, so it neither pays for its absence nor
profits from it. No tenant has more than `per_tenant` slots, so that some are left for the others.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from shared.errors import CapacityError

_TOO_MANY: Final = 429


@dataclass(slots=True)
class _Tenant:
    """A tenant that waits or has slots.

    Attributes:
        waiting: a future per waiting caller, which is resolved with the slot.
        running: the number of its slots.
        used_s: the time that its work has taken, in seconds.
    """

    used_s: float
    running: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class FairSlots:
    """`slots` slots for work; `what` names the work in errors, and `code` is their code.

    Args:
        per_tenant: the most slots of one tenant.
        max_waiting: the most callers that wait, of all tenants; `per_tenant_waiting` of one tenant.
    """

    def __init__(
        self, slots: int, *, per_tenant: int, max_waiting: int, per_tenant_waiting: int, what: str, code: str
    ) -> None:
        self._free = slots
        self._per_tenant = per_tenant
        self._max_waiting = max_waiting
        self._per_tenant_waiting = per_tenant_waiting
        self._what = what
        self._code = code
        self._tenants: dict[str, _Tenant] = {}

    @property
    def waiting(self) -> int:
        """The number of callers that wait."""
        return sum(len(tenant.waiting) for tenant in self._tenants.values())

    async def acquire(self, name: str) -> None:
        """Wait for a slot for the tenant `name`; each slot must be released. A cancelled caller leaves.

        Raises:
            CapacityError: too many callers wait.
        """
        tenant = self._tenants.get(name) or self._enter(name)
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tenant.waiting.append(given)
        self._give_slots()
        if not given.done():
            try:
                self._check_room(tenant)
            except CapacityError:
                tenant.waiting.remove(given)
                self._leave_if_idle(name)
                raise
        try:
            await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled() and given.exception() is None:
                self.release(name, 0.0)
            else:
                if given in tenant.waiting:
                    tenant.waiting.remove(given)
                self._leave_if_idle(name)
            raise

    def release(self, name: str, used_s: float) -> None:
        """Return a slot of the tenant `name`, whose work took `used_s` seconds."""
        tenant = self._tenants[name]
        tenant.running -= 1
        tenant.used_s += used_s
        self._free += 1
        self._give_slots()
        self._leave_if_idle(name)

    def _enter(self, name: str) -> _Tenant:
        least_s = min((tenant.used_s for tenant in self._tenants.values()), default=0.0)
        tenant = self._tenants[name] = _Tenant(least_s)
        return tenant

    def _leave_if_idle(self, name: str) -> None:
        tenant = self._tenants.get(name)
        if tenant is not None and not tenant.waiting and not tenant.running:
            del self._tenants[name]

    def _give_slots(self) -> None:
        """Give the free slots to those whose turn it is."""
        while self._free:
            able = [
                tenant
                for tenant in self._tenants.values()
                if tenant.waiting and tenant.running < self._per_tenant
            ]
            if not able:
                return
            tenant = min(able, key=lambda tenant: (tenant.used_s, tenant.running))
            given = tenant.waiting.popleft()
            if not given.done():  # it is, if its caller has been cancelled
                tenant.running += 1
                self._free -= 1
                given.set_result(None)

    def _check_room(self, tenant: _Tenant) -> None:
        """Check the limits after a caller has been added. Above the limit of all, the longest queue is cut.

        Raises:
            CapacityError: the added caller has no room.
        """
        if len(tenant.waiting) > self._per_tenant_waiting:
            raise self._full(f"{self._per_tenant_waiting} of this key", _TOO_MANY)
        if self.waiting <= self._max_waiting:
            return
        error = self._full(str(self._max_waiting), CapacityError.status)
        longest = max(self._tenants.values(), key=lambda other: len(other.waiting))
        if len(longest.waiting) <= len(tenant.waiting):
            raise error
        longest.waiting.pop().set_exception(error)

    def _full(self, found: str, status: int) -> CapacityError:
        return CapacityError(
            f"{self._what}: {found} are waiting already; try again later", code=self._code, status=status
        )
