"""Error classes, which state whose fault an error is and whether a retry helps.

    DalSegnoError
    ├── ClientError           the request is wrong; a retry does not help              400, 404, 409, 413, 422
    ├── CapacityError         the request is right; try again later                    429, 503
    ├── WorkerError           a worker failed; the request may be tried elsewhere      500
    │   ├── TensorGone        a handle's bytes are gone; its producer runs again
    │   └── WeightsChangedError   the answer was begun by another model; a new request succeeds  503
    └── BugError              an invariant is broken; please report it                 500
        └── Divergence        a recorded decision differs from the same decision made again

In the log an error is a `shared.events.Failure`: `code` is stable and meant for programs, `message` for
people, and `status` is the HTTP status of the gateway's response.
"""


class DalSegnoError(Exception):
    """The base class of all errors.

    Attributes:
        code: a stable code for programs. Each class has a default, and an error may have a more specific one.
        status: the HTTP status, by the same rule.
        message: what was expected, what was found, what to do.
        param: the name of the wrong field, if known.
    """

    code: str = "internal_error"
    status: int = 500
    param: str | None = None

    def __init__(self, message: str, *, code: str | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.status = status or type(self).status

    @property
    def failure_code(self) -> str:
        return self.code

    @property
    def failure_status(self) -> int:
        return self.status


class ClientError(DalSegnoError):
    """The request is wrong: it names something unknown, malformed, or impossible."""

    code = "invalid_request"
    status = 400


class ModelNotFoundError(ClientError):
    """The request names a model that this deployment does not serve."""

    code = "model_not_found"
    status = 404
    param = "model"

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(f"the model {asked[:200]!r} does not exist here; this deployment serves {served!r}")


class CapacityError(DalSegnoError):
    """The request is valid but cannot be accepted now.

    Attributes:
        retry_after_s: the time after which it may be accepted, in seconds; None if unknown.
    """

    code = "overloaded"
    status = 503
    retry_after_s: float | None = None


class WorkerError(DalSegnoError):
    """A worker could not execute its part of a request."""

    code = "worker_failed"
    status = 500


class TensorGone(WorkerError):  # noqa: N818 - a state of a tensor rather than a fault
    """The bytes of a handle no longer exist."""

    code = "tensor_gone"


class WeightsChangedError(WorkerError):
    """The weights that a request was begun with are not loaded any more, and output of them was released.

    The request is valid: sent again, it is answered with the present weights.
    """

    code = "weights_changed"
    status = 503


class BugError(DalSegnoError):
    """An invariant of this program is broken."""

    code = "internal_error"


class Divergence(BugError):  # noqa: N818 - the field's term
    """A recorded decision differs from the decision made again from the same facts."""

    code = "divergence"
