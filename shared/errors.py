"""Errors: whose fault it is, and whether trying again helps.

    DalSegnoError
    ├── ClientError           the request is wrong; sending it again is of no use      400, 404, 409, 413, 422
    ├── CapacityError         nothing is wrong, but not now; try again later           429, 503
    ├── WorkerError           a worker failed; the request may be tried elsewhere      500
    │   └── TensorGone        a handle's bytes are gone; its producer runs again
    └── BugError              one of our own promises is broken; please report it      500
        └── Divergence        a recorded decision differs from the one decided again

An error that must cross the log travels as `shared.events.Failure`: `code` is stable and meant for
programs, `message` for people, `status` is the HTTP status the gateway answers with.
"""


class DalSegnoError(Exception):
    """The root.

    Attributes:
        code: stable, for programs; a class has its own, an error may have a nearer one.
        status: the HTTP status, by the same rule.
        message: what was expected, what was found, what to do.
        param: the field that is wrong, where it is known to be one.
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
    """The request is fine but cannot be taken now."""

    code = "overloaded"
    status = 503


class WorkerError(DalSegnoError):
    """A worker could not do its part."""

    code = "worker_failed"
    status = 500


class TensorGone(WorkerError):  # noqa: N818 - a fact about a tensor, not an error of anybody's
    """The bytes behind a handle are gone."""

    code = "tensor_gone"


class BugError(DalSegnoError):
    """A promise of our own is broken."""

    code = "internal_error"


class Divergence(BugError):  # noqa: N818 - the field's word
    """A recorded decision differs from the decision made again from the same facts."""

    code = "divergence"
