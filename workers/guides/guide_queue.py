"""The queue in which clients' guides are checked and compiled, apart from all other requests.

    prepare ── a guide ── known? ── tenant's budget ── fair queue ── a thread: trial process, compile ── ready
                            │              │                │
                            └── refused    └── 429          └── 429, 503

Guides that are equal are checked once, for all requests that wait for them. A request that ends leaves the
queue; a check that has begun continues, because its result is remembered.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from models.base import GuideToCheck, Processing
from models.text.guide_cost import CpuTime
from models.text.guiding import Guiding
from shared.errors import BugError, CapacityError, ClientError
from shared.events import Guide
from shared.meters import GuideMeters
from shared.telemetry.histogram import SECONDS, Histogram
from workers.guides.budget import CpuBudget
from workers.guides.compile_thread import in_thread
from workers.threads.fair_slots import FairSlots

if TYPE_CHECKING:
    from models.text.guides import CompiledGuide, GuideCompiler

SLOTS: Final = 2
"""The most guides that are checked at a time; one per tenant."""
MAX_WAITING: Final = 512
MAX_WAITING_PER_TENANT: Final = 64
BUDGET_S: Final = 10.0
"""The processor time of one tenant's guides in `WINDOW_S`: some 1,500 small schemas, each different."""
WINDOW_S: Final = 60.0
BAN_S: Final = 5.0
"""The charge to a tenant whose guide was banned for slow masks: all requests waited for them."""
LIMIT_S: Final = 30.0
"""Time limit of one check. Its processor time is limited more strictly (`models.text.guide_trial.CPU_S`)."""
_TOO_MANY: Final = 429


class GuideBudgetError(CapacityError):
    """The guides of one tenant have taken too much processor time."""

    code = "guide_budget_exceeded"
    status = _TOO_MANY

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


_Key: TypeAlias = tuple[str, bytes, bool]
"""The tenant, the guide's bytes, and whether it is accepted."""


@dataclass(slots=True)
class _Job:
    """A guide that is being checked or compiled, for requests of one tenant: its turn and budget are theirs.

    Attributes:
        is_accepted: it has been checked before, here or on another rank, and is only compiled.
        waiters: the requests that wait for it.
        has_begun: it has its slot, and continues without waiters.
    """

    guide: Guide
    tenant: str
    is_accepted: bool
    task: "asyncio.Task[CompiledGuide]" = field(init=False)
    waiters: int = 0
    has_begun: bool = False

    @property
    def key(self) -> _Key:
        return self.tenant, msgspec.msgpack.encode(self.guide), self.is_accepted


class GuideQueue:
    """Checks and compiles the guides of one worker's requests, for one event loop."""

    def __init__(self, processing: Processing, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._compiler: GuideCompiler | None = processing.guides if isinstance(processing, Guiding) else None
        self._budget = CpuBudget(BUDGET_S, WINDOW_S, clock)
        self._clock = clock
        self._slots = FairSlots(
            SLOTS,
            per_tenant=1,
            max_waiting=MAX_WAITING,
            per_tenant_waiting=MAX_WAITING_PER_TENANT,
            what="the guides that have to be compiled",
            code="guide_queue_full",
        )
        self._jobs: dict[_Key, _Job] = {}
        self._invalid = 0
        self._turned_away = 0
        self._cpu_s = Histogram.over(SECONDS)

    def meters(self) -> GuideMeters:
        """The counters, with the present length of the queue."""
        return GuideMeters(
            waiting=self._slots.waiting,
            invalid=self._invalid,
            turned_away=self._turned_away,
            cpu_s=self._cpu_s,
        )

    async def check(self, asked: GuideToCheck, tenant: str) -> None:
        """Check a client's guide, and compile it.

        Raises:
            InvalidGuideError: it is refused.
            CapacityError: it could not be checked now; only this request is affected.
        """
        try:
            await self._result(asked.guide, tenant, is_accepted=False)
        except ClientError as error:
            self._invalid += 1
            if not asked.param:
                raise
            what = getattr(error, "what", error.message)
            raise ClientError(f"{asked.param}: {what}", code=error.code, status=error.status) from error
        except CapacityError:
            self._turned_away += 1
            raise

    async def compiled(self, guide: Guide, tenant: str) -> "CompiledGuide":
        """A guide that a check, here or on another rank, has accepted: it is not checked again."""
        return await self._result(guide, tenant, is_accepted=True)

    async def _result(self, guide: Guide, tenant: str, *, is_accepted: bool) -> "CompiledGuide":
        compiler = self._compiler
        if compiler is None:
            raise BugError("the request has a guide, but the model family's processing cannot compile guides")
        known = compiler.known(guide)
        if known is not None:
            return known
        new = _Job(guide, tenant, is_accepted)
        job = self._jobs.get(new.key)
        if job is None:
            self._check_budget(new)
            job = self._jobs[new.key] = new
            job.task = asyncio.create_task(self._run(job, compiler), name="guide")
            job.task.add_done_callback(_note_failure)
        job.waiters += 1
        try:
            return await asyncio.shield(job.task)
        finally:
            job.waiters -= 1
            if not job.waiters and not job.has_begun:
                self._forget(job)
                job.task.cancel()

    def _check_budget(self, job: _Job) -> None:
        wait_s = 0.0 if job.is_accepted else self._budget.wait_s(job.tenant)
        if wait_s > 0:
            retry_after_s, spent_s = math.ceil(wait_s), self._budget.spent_s(job.tenant)
            raise GuideBudgetError(
                f"expected the guides of this key to take at most {self._budget.limit_s:g} s of processor "
                f"time in {self._budget.window_s:g} s, found {spent_s:.1f} s; try again in "
                f"{retry_after_s} s, with simpler guides, or with the same one for several requests",
                retry_after_s,
            )

    async def _run(self, job: _Job, compiler: "GuideCompiler") -> "CompiledGuide":
        """Check or compile a guide when it is its turn."""
        try:
            await self._slots.acquire(job.tenant)
            job.has_begun = True
            try:
                self._check_budget(job)  # guides before this one may have used it up
            except GuideBudgetError:
                self._slots.release(job.tenant, 0.0)
                raise
            return await self._in_slot(job, compiler)
        finally:
            self._forget(job)

    async def _in_slot(self, job: _Job, compiler: "GuideCompiler") -> "CompiledGuide":
        cpu_time, begun_s = CpuTime(), self._clock()
        try:
            compiled = await in_thread(partial(_compiled, job, compiler, cpu_time), LIMIT_S)
        except TimeoutError as error:
            cpu_time.seconds += self._clock() - begun_s
            raise CapacityError(
                f"the guide could not be compiled within {LIMIT_S:g} s; try again later, or with a simpler "
                "one",
                code="guide_not_tried",
            ) from error
        else:
            charge = partial(self._budget.charge, job.tenant, BAN_S)
            compiled.on_ban = partial(asyncio.get_running_loop().call_soon_threadsafe, charge)
            return compiled
        finally:
            self._cpu_s.observe(cpu_time.seconds)
            self._budget.charge(job.tenant, cpu_time.seconds)
            self._slots.release(job.tenant, cpu_time.seconds)

    def _forget(self, job: _Job) -> None:
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]


def _compiled(job: _Job, compiler: "GuideCompiler", cpu_time: CpuTime) -> "CompiledGuide":
    """Check and compile a guide; called in a thread."""
    if not job.is_accepted:
        return compiler.check(job.guide, cpu_time)
    begun_s = time.thread_time()
    try:
        return compiler.compiled(job.guide)
    finally:
        cpu_time.seconds += time.thread_time() - begun_s


def _note_failure(task: "asyncio.Task[CompiledGuide]") -> None:
    """Retrieve the error of a check that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
