"""Stepped nodes on their device: runs with tensors, their calls in one forward, and their results as bytes.

A run fails alone: where the calls of several runs cannot be computed together, each is computed by itself.
A checkpoint that cannot be used costs the steps before it: the run begins again, and the log says so.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from models.base import Item, StatelessResult
from models.programs import Going
from models.stepped import Call, Run, SteppedNode
from shared.errors import BugError
from workers.data_plane.arrays import to_array, to_tensor
from workers.data_plane.port import Array
from workers.machine.gpu_context import check_context
from workers.stateless_engine import stepped_runs
from workers.stateless_engine.firing import FiringReport, StatelessFiring
from workers.stateless_engine.results import failure_of, item_of, result_of
from workers.stateless_engine.stepped_runs import Progressed, StepOf

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class TorchRun:
    """A run of a node; `run` is None if it has not even begun."""

    firing: StatelessFiring
    run: Run | None = None
    call: Call | None = None

    def close(self) -> None:
        """End it, whatever it waits for; an error of a model there ends nothing else."""
        run, self.run, self.call = self.run, None, None
        if run is None:
            return
        try:
            run.close()
        except Exception:
            _LOGGER.exception("node %s: a run failed while it was closed", self.firing.node)


class TorchStepper:
    """A stepped node on its device (`workers.stateless_engine.stepped_runs.Stepper`).

    One thread uses it. All of a run is computed in inference mode: a run may leave a `no_grad` block of its
    own open between two calls, which changes nothing then. Each method raises `DeviceLostError` if the GPU
    cannot be used by this process any more.
    """

    def __init__(self, name: str, node: SteppedNode, device: torch.device) -> None:
        self.max_batch: Final = node.max_batch
        self.max_runs: Final = node.max_runs
        self.max_cost: Final = float(getattr(node, "max_cost", None) or "inf")
        self._name = name
        self._node = node
        self._device = device

    @torch.inference_mode()
    def begin(self, firing: StatelessFiring) -> tuple[TorchRun, Progressed]:
        """Start a run, and compute up to its first call."""
        made = TorchRun(firing)
        try:
            item = item_of(firing, self._device)
            made.run = self._started(item, firing)
            return made, self._progressed(made, made.run.begin())
        except Exception as error:  # noqa: BLE001 - an error of a model fails its run alone
            return made, self._failed(made, error)

    @torch.inference_mode()
    def advance(self, runs: Sequence[stepped_runs.Run]) -> list[Progressed]:
        """Compute the calls of runs in one forward, and each run up to its next call."""
        asked = [run for run in runs if isinstance(run, TorchRun)]
        calls = [run.call for run in asked if run.call is not None]
        taken = [self._taken(run, result) for run, result in zip(asked, self._computed(calls), strict=True)]
        self._wait_for_device()
        return taken

    def _wait_for_device(self) -> None:
        """Wait for what was launched: its duration counts, and a cancelled run must not be steps ahead."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _started(self, item: Item, firing: StatelessFiring) -> Run:
        state = {name: to_tensor(array, self._device) for name, array in firing.state.items()}
        try:
            return self._node.start(item, state)
        except ValueError as error:
            if not state:
                raise
            _LOGGER.warning(
                "node %s starts from its inputs: its checkpoint cannot be used: %s", self._name, error
            )
            return self._node.start(item, {})

    def _computed(self, calls: Sequence[Call]) -> list[Any]:
        """The result of each call; an exception in the place of one that failed by itself."""
        try:
            results: list[Any] | None = self._node.compute(calls)
        except Exception as error:  # noqa: BLE001 - an error of a model fails this batch only
            check_context(self._device)
            _LOGGER.warning(
                "node %s: %s: %s, in a forward over %d calls",
                self._name, type(error).__name__, str(error), len(calls),
            )  # fmt: skip
            if len(calls) == 1:
                return [error]
            results = None
        if results is None:  # after the block above, which holds the memory of the forward that failed
            return [result for call in calls for result in self._computed([call])]
        if len(results) != len(calls):
            wrong = BugError(f"node {self._name!r} returned {len(results)} results for {len(calls)} calls")
            return [wrong] * len(calls)
        return list(results)

    def _taken(self, run: TorchRun, result: Any) -> Progressed:
        if isinstance(result, Exception):
            return self._failed(run, result)
        assert run.run is not None
        try:
            return self._progressed(run, run.run.take(result))
        except Exception as error:  # noqa: BLE001 - an error of a model fails its run alone
            return self._failed(run, error)

    def _progressed(self, run: TorchRun, found: Call | StatelessResult) -> Progressed:
        if isinstance(found, Call):
            run.call = found
            return Progressed(StepOf(found.group, found.cost), _report(found.report))
        return Progressed(result_of(run.firing, found))

    def _failed(self, run: TorchRun, error: Exception) -> Progressed:
        check_context(self._device)
        run.close()
        return Progressed(failure_of(self._name, error))


def _report(going: Going | None) -> FiringReport | None:
    if going is None:
        return None
    return FiringReport(
        progress=dict(going.progress),
        previews=_arrays(going.previews),
        state=_arrays(going.state),
    )


def _arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """Copies in main memory: the event loop reads them while the run goes on, which may write in place."""
    return {
        name: to_array(tensor.detach().clone() if tensor.device.type == "cpu" else tensor)
        for name, tensor in tensors.items()
    }
