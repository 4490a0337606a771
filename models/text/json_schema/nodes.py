"""The schemas inside of a schema, and the targets of its references."""

from collections.abc import Iterable, Iterator
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

Node = dict[str, Any]

_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values are schemas by name."""
_SCHEMAS: Final = (
    "allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalItems", "additionalProperties",
)  # fmt: skip
"""Keywords whose values are schemas, or lists of them."""


def _children(node: Node) -> Iterator[Any]:
    for key in _MAPS:
        inside = node.get(key)
        if isinstance(inside, dict):
            yield from inside.values()
    for key in _SCHEMAS:
        inside = node.get(key)
        if isinstance(inside, list):
            yield from inside
        else:
            yield inside


def plain_values(constants: Iterable[Any]) -> Iterator[Any]:
    """The values inside of constants that are neither lists nor objects, in any order."""
    inside = list(constants)
    while inside:
        value = inside.pop()
        if isinstance(value, list):
            inside += value
        elif isinstance(value, dict):
            inside += value.values()
        else:
            yield value


class SchemaTree:
    """The schemas inside of a schema that are objects, and the targets of their references.

    Args:
        root: the whole schema. Its objects must be distinct.

    Attributes:
        nodes: the schema itself, and the schemas inside of it.
    """

    def __init__(self, root: Node) -> None:
        self.nodes: Final[list[Node]] = []
        self._root = root
        self._bases: dict[int, str] = {}
        self._named: dict[str, Any] = {"": root}
        self._enter_all([(root, "")])
        known = 0
        while known < len(self.nodes):  # references may lead to schemas that no keyword leads to
            fresh, known = self.nodes[known:], len(self.nodes)
            self._enter_all([(self.target(node), self._bases[id(node)]) for node in fresh])

    def _enter_all(self, inside: list[tuple[Any, str]]) -> None:
        """Add schemas, each with the base of its references, and those inside of them."""
        while inside:
            node, base = inside.pop()
            if isinstance(node, dict) and id(node) not in self._bases:
                base = self._enter(node, base)
                inside += ((child, base) for child in _children(node))

    def _enter(self, node: Node, base: str) -> str:
        """Add a node; return the base of the references in it."""
        named = node.get("$id", node.get("id"))
        if isinstance(named, str):
            base = urldefrag(urljoin(base, named)).url
            self._named[urljoin(base, named).rstrip("#")] = node
        if isinstance(node.get("$anchor"), str):
            self._named[f"{base}#{node['$anchor']}"] = node
        self._bases[id(node)] = base
        self.nodes.append(node)
        return base

    def target(self, node: Node) -> Any:
        """The schema that the `$ref` of a node leads to; None if there is none, or no such schema."""
        reference = node.get("$ref")
        if not isinstance(reference, str):
            return None
        base = self._bases[id(node)]
        whole = base if reference == "#" else urljoin(base, reference).rstrip("#")
        if whole in self._named:
            return self._named[whole]
        document, fragment = urldefrag(whole)
        found = self._named.get(document)
        for part in unquote(fragment).split("/")[1:]:
            found = _child(found, part.replace("~1", "/").replace("~0", "~"))
        return found if fragment.startswith("/") else None


def _child(part: Any, key: str) -> Any:
    if isinstance(part, dict):
        return part.get(key)
    if isinstance(part, list) and key.isdecimal() and int(key) < len(part):
        return part[int(key)]
    return None
