"""A Jinja sandbox whose templates end: the processor time that they take is limited.

Jinja's sandbox limits what a template can reach, and the length of a `range`, but nested loops, and macros
that call themselves twice, run for longer than anybody waits. A thread that renders cannot be stopped from
outside, so the template is compiled with checks: before each item of a loop, and in each call of a macro.
Multiplications and powers, which are one long operation, are checked by the size of their result.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

LIMIT_S: Final = 2.0
"""Processor time of one rendering. The templates of checkpoints take milliseconds."""
LARGEST: Final = 10_000_000
"""The longest result of a multiplication of texts and lists, and the most bits of a power."""


class TemplateLimitError(jinja2.TemplateError):
    """The template exceeds a limit."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with limits. Templates are rendered in `bounded()`; re-entrant."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._rendering = threading.local()

    @contextmanager
    def bounded(self, limit_s: float = LIMIT_S) -> Iterator[None]:
        """Limit the templates that this thread renders within the block."""
        self._rendering.until_s, self._rendering.limit_s = time.thread_time() + limit_s, limit_s
        try:
            yield
        finally:
            del self._rendering.until_s

    def checked(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop, with a check before each."""
        for item in items:
            self.check()
            yield item

    def check(self) -> str:
        """End the rendering if its time is over; returns an empty text, because a template outputs it."""
        if time.thread_time() > self._rendering.until_s:
            raise TemplateLimitError(f"it did not end within {self._rendering.limit_s:g} s of processor time")
        return ""

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A multiplication or a power, unless its result is too large."""
        if operator == "**":
            size = left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0
        else:
            size = max(_size(left, right), _size(right, left))
        if size > LARGEST:
            raise TemplateLimitError(f"the result of {operator} would be larger than {LARGEST}")
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        for node in list(source.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
            if isinstance(node, nodes.For):
                node.iter = self._call("checked", node.iter)
            if not isinstance(node, nodes.For) or node.recursive:
                node.body.insert(0, nodes.ExprStmt(self._call("check")))
        source.set_lineno(1)  # of the nodes that have none
        source.set_environment(self)
        return super()._generate(source, *args, **options)

    @staticmethod
    def _call(name: str, *args: nodes.Node) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)


def _size(times: Any, repeated: Any) -> int:
    """The length of a text or list that is repeated so many times; 0 for other values."""
    return times * len(repeated) if isinstance(times, int) and isinstance(repeated, str | list | tuple) else 0
