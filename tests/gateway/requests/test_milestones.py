from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from gateway.requests.milestones import Milestones
from shared.events import OutputFence, RequestResumed
from shared.subjects import CONDUCTOR_WRITER
from tests.admissions import admitted


def written(milestones: Milestones) -> list[tuple[str, int]]:
    """The events of a span: their names and times."""
    span = TracerProvider().get_tracer("test").start_span("answer")
    milestones.write(span)
    assert isinstance(span, ReadableSpan)
    return [(event.name, event.timestamp) for event in span.events]


def fence(lives: dict[str, int]) -> OutputFence:
    return OutputFence(
        writer=CONDUCTOR_WRITER, epoch=1, attempt=2, reason="w0 is lost", history=b"", lives=lives
    )


def resumed(index: int) -> RequestResumed:
    return RequestResumed(writer=CONDUCTOR_WRITER, epoch=1, index=index, placement={}, reason="w0 is back")


def test_a_request_is_queued_no_later_than_admitted() -> None:
    milestones = Milestones("r")
    milestones.observe(admitted("r"), 500)  # read before the ack of the submission
    milestones.submitted(900)

    assert written(milestones) == [("queued", 500), ("admitted", 500)]


def test_a_request_is_queued_from_the_ack_on() -> None:
    milestones = Milestones("r")
    milestones.submitted(100)
    milestones.observe(admitted("r"), 500)

    assert written(milestones) == [("queued", 100), ("admitted", 500)]


def test_each_resumption_counts_once() -> None:
    milestones = Milestones("r")
    for time_ns, event in enumerate((resumed(0), resumed(0), resumed(1), resumed(1))):
        milestones.observe(event, time_ns)

    assert written(milestones) == [("resumed", 0), ("resumed", 2)]


def test_a_request_that_continues_elsewhere_at_once_is_not_held() -> None:
    milestones = Milestones("r")
    milestones.observe(fence({"w1": 7}), 1)

    assert written(milestones) == []
    milestones.observe(fence({}), 2)
    assert written(milestones) == [("held", 2)]
