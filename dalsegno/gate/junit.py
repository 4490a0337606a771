"""The verdict as JUnit XML, for CI systems. Pure.

CI systems list failed test cases by name and compare the names of two runs. So a group of differences is one
test case, named by event and field, and not each of a thousand requests. What was compared without a
difference is one test case per level and event type; an accepted group is skipped, with its reason; what
could not be repeated is an error.
"""

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from dalsegno.gate import differences
from dalsegno.gate.differences import Group, Level
from dalsegno.gate.verdict import Failed, Verdict
from dalsegno.terminal.sanitise import plain

_SHOWN_REQUESTS = 100
DECIDED = {
    "control": (
        "node.ready", "output.fence", "request.cancelled", "request.failed", "request.finished", "walk.stop",
    ),
    "schedule": ("request.admitted", "request.rejected", "request.resumed"),
    "data": (),
}  # fmt: skip
"""By level, the event types that it decides again."""


def document(verdict: Verdict) -> bytes:
    """The whole document."""
    root = Element("testsuites", name="dalsegno gate")
    for total in verdict.levels:
        _suite(root, verdict, total.level)
    if verdict.unused or verdict.expired:
        _entries(root, verdict)
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    indent(root)
    text: bytes = tostring(root, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def _suite(root: Element, verdict: Verdict, level: Level) -> None:
    groups = [one for one in verdict.groups if one.level == level]
    accepted = [
        (entry, group) for entry, members in verdict.accepted for group in members if group.level == level
    ]
    failed = [one for one in verdict.failed if one.level == level]
    suite = SubElement(root, "testsuite", name=f"gate.{level}")
    total = next(one for one in verdict.levels if one.level == level)
    differing = {group.event for group in groups}
    if total.requests:
        for event in DECIDED[level]:
            if (count := verdict.events.get(event)) and event not in differing:
                case = _case(suite, level, f"{event} as recorded")
                SubElement(case, "system-out").text = f"requests with this event: {count}"
        if level == "data" and not groups:
            _case(suite, level, f"outputs of {total.requests} requests as recorded")
    for group in groups:
        failure = SubElement(_case(suite, level, group.name), "failure", type="difference")
        failure.set("message", plain(differences.line_of(group)))
        failure.text = _members(group)
    for entry, group in accepted:
        skipped = SubElement(_case(suite, level, f"{group.name} (accepted)"), "skipped")
        skipped.set("message", plain(f"{entry.reason} ({entry.author}, until {entry.expires})"))
    for one in failed:
        _failed(suite, one)
    _count(suite)


def _failed(suite: Element, one: Failed) -> None:
    case = _case(suite, one.level, f"not replayable: {one.reason}")
    what = SubElement(case, "error" if one.counts else "skipped")
    what.set("message", plain(one.reason))
    what.text = "\n".join(map(plain, one.requests[:_SHOWN_REQUESTS]))


def _entries(root: Element, verdict: Verdict) -> None:
    suite = SubElement(root, "testsuite", name="gate.accept")
    for one in verdict.unused:
        failure = SubElement(_case(suite, "accept", one.name), "failure", type="unused")
        failure.set("message", f"entry {one.place} accepts nothing: remove it")
    for one in verdict.expired:
        failure = SubElement(_case(suite, "accept", one.name), "failure", type="expired")
        failure.set("message", plain(f"entry {one.place} expired on {one.expires} ({one.author})"))
    _count(suite)


def _members(group: Group) -> str:
    shown = [
        plain(
            f"{one.request_id} at {one.seq}: {differences.as_json(one.recorded)} -> "
            f"{differences.as_json(one.found)}"
        )
        for one in group.members[:_SHOWN_REQUESTS]
    ]
    if (more := len(group.members) - len(shown)) > 0:
        shown.append(f"and {more:,} more")
    return "\n".join(shown)


def _case(suite: Element, group: str, name: str) -> Element:
    return SubElement(suite, "testcase", classname=f"gate.{group}", name=plain(name))


def _count(suite: Element) -> None:
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(sum(case.find(tag) is not None for case in suite)))
    suite.set("tests", str(len(suite)))
