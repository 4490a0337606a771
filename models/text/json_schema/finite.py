"""A search for finite values of a schema.

A schema whose references never end (`{"properties": {"next": {"$ref": "#"}}, "required": ["next"]}`) has no
finite value, but the compiler accepts it: each next token is allowed, and the answer never ends.

A *demand* is a set of schemas that one value must satisfy. It is satisfied by one of several alternatives,
and each of these demands values for required properties and items. Demands with a finite value are found from
the leaves up (a least fixpoint). Numbers, lengths and patterns are not considered; the compiler does.
"""

from typing import Any, Final, NamedTuple

from models.text.json_schema.errors import UnsupportedSchemaError
from models.text.json_schema.nodes import Node, SchemaTree

_MOST_VISITS: Final = 10_000
"""The most schemas that are looked at, in 30 ms of Python beside the engine's thread."""
_SCALARS: Final = frozenset({"null", "boolean", "number", "string"})
_TYPES: Final = _SCALARS | {"array", "object"}
_IMPOSSIBLE: Final[Node] = {"not": {}}
"""The schema `false`."""


class _Demand(NamedTuple):
    """Schemas that one value must satisfy, by the `id` of the object.

    Attributes:
        schemas: the schemas.
        chosen: the keywords `anyOf` and `oneOf` of which a branch is already among the schemas.
    """

    schemas: frozenset[int]
    chosen: frozenset[tuple[int, str]] = frozenset()


_Alternatives = list[list[_Demand]]
"""Ways to satisfy a demand, each with further demands."""


def check_finite(tree: SchemaTree) -> None:
    """Refuse a schema that no finite value satisfies.

    Of a contradiction, which not even an infinite value satisfies, the compiler says where it is. A schema
    without references needs no search: its values are as deep as itself.

    Raises:
        UnsupportedSchemaError: there is none, or it takes too long to find out.
    """
    if not any("$ref" in node for node in tree.nodes):
        return
    search = _Search(tree)
    demand, known = search.demands_of(tree.nodes[0])
    if demand in _possible(known) - _finite(known):
        raise UnsupportedSchemaError(
            "expected a schema with finite values, found references that lead back to themselves in every "
            "value; make one of the properties or items on the way optional, or add an alternative without it"
        )


class _Search:
    def __init__(self, tree: SchemaTree) -> None:
        self._tree = tree
        self._by_id: dict[int, Node] = {id(node): node for node in (*tree.nodes, _IMPOSSIBLE)}
        self._unlisted: dict[int, Node] = {}
        self._visits = 0

    def demands_of(self, root: Node) -> tuple[_Demand, dict[_Demand, _Alternatives]]:
        """The demand of a schema, and the alternatives of it and of all demands that follow from it."""
        first = self._demand([root])
        known: dict[_Demand, _Alternatives] = {}
        waiting = [first]
        while waiting:
            demand = waiting.pop()
            if demand not in known:
                known[demand] = self._alternatives(demand)
                waiting += (further for way in known[demand] for further in way)
        return first, known

    def _demand(self, schemas: list[Any]) -> _Demand:
        self._count_visits(len(schemas))
        found = [_IMPOSSIBLE if one is False else one for one in schemas]
        return _Demand(frozenset(id(one) for one in found if id(one) in self._by_id))

    def _alternatives(self, demand: _Demand) -> _Alternatives:
        nodes = self._closure(demand)
        for node in nodes:
            for key in ("anyOf", "oneOf"):
                branches = node.get(key)
                if isinstance(branches, list) and (id(node), key) not in demand.chosen:
                    schemas = demand.schemas | {id(one) for one in nodes}
                    chosen = demand.chosen | {(id(node), key)}
                    return [[_Demand(schemas | self._demand([one]).schemas, chosen)] for one in branches]
        if any(node is _IMPOSSIBLE for node in nodes):
            return []
        types = frozenset(_TYPES).intersection(*(_types_of(node) for node in nodes))
        if types & _SCALARS or any("const" in node or "enum" in node for node in nodes):
            return [[]]
        found: _Alternatives = []
        if "array" in types:
            found.append(self._of_array(nodes))
        if "object" in types:
            found += self._of_object(nodes)
        return found

    def _closure(self, demand: _Demand) -> list[Node]:
        """The schemas of a demand, and those that they include by `$ref` and `allOf`."""
        found: dict[int, Node] = {}
        waiting: list[Any] = [self._by_id[one] for one in demand.schemas]
        while waiting:
            node = waiting.pop()
            node = _IMPOSSIBLE if node is False else node
            if not isinstance(node, dict) or id(node) not in self._by_id or id(node) in found:
                continue
            self._count_visits(1)
            found[id(node)] = node
            if node is not _IMPOSSIBLE:
                waiting.append(self._tree.target(node))
            waiting += node["allOf"] if isinstance(node.get("allOf"), list) else []
        return list(found.values())

    def _count_visits(self, visits: int) -> None:
        self._visits += visits
        if self._visits > _MOST_VISITS:
            raise UnsupportedSchemaError(
                "expected a schema whose references can be followed in time, found too many of them; "
                "give it fewer references, or fewer alternatives in one place"
            )

    def _of_array(self, nodes: list[Node]) -> list[_Demand]:
        """The demands of the fewest items."""
        fewest = max((_count(node, "minItems") for node in nodes), default=0)
        listed = max((len(_listed_items(node)) for node in nodes), default=0)
        # All items after the listed ones have one demand.
        return [
            self._demand([_item(node, index) for node in nodes]) for index in range(min(fewest, listed + 1))
        ]

    def _of_object(self, nodes: list[Node]) -> _Alternatives:
        """The demands of the required properties, and of one more if there must be one."""
        required = {
            name
            for node in nodes
            if isinstance(node.get("required"), list)
            for name in node["required"]
            if isinstance(name, str)
        }
        demands = [self._demand([self._property(node, name) for node in nodes]) for name in sorted(required)]
        if all(_count(node, "minProperties") <= len(required) for node in nodes):
            return [demands]
        names = [name for node in nodes for name in _named(node, "properties") if name not in required]
        more = [self._demand([self._property(node, name) for node in nodes]) for name in names]
        more.append(self._demand([self._other_property(node) for node in nodes]))
        return [[*demands, one] for one in more]

    def _property(self, node: Node, name: str) -> Any:
        """The schema of a property in one of the schemas."""
        known = _named(node, "properties")
        return known[name] if name in known else self._other_property(node)

    def _other_property(self, node: Node) -> Any:
        """The schema of any property that is not listed.

        Names are not compared with `patternProperties`: a pattern of a client may take forever.
        """
        patterns, others = _named(node, "patternProperties"), node.get("additionalProperties", True)
        if not patterns:
            return others
        either = self._unlisted.setdefault(id(node), {"anyOf": [*patterns.values(), others]})
        self._by_id[id(either)] = either
        return either


def _finite(known: dict[_Demand, _Alternatives]) -> set[_Demand]:
    """The demands that a finite value satisfies: the least fixpoint."""
    found: set[_Demand] = set()
    before = -1
    while len(found) > before:
        before = len(found)
        for demand in reversed(known):
            if any(all(one in found for one in way) for way in known[demand]):
                found.add(demand)
    return found


def _possible(known: dict[_Demand, _Alternatives]) -> set[_Demand]:
    """The demands that a finite or an infinite value satisfies: the greatest fixpoint."""
    found = set(known)
    before = len(found) + 1
    while len(found) < before:
        before = len(found)
        for demand in reversed(known):
            if not any(all(one in found for one in way) for way in known[demand]):
                found.discard(demand)
    return found


def _types_of(node: Node) -> frozenset[str]:
    given = node.get("type", sorted(_TYPES))
    names = given if isinstance(given, list) else [given]
    return frozenset("number" if name == "integer" else str(name) for name in names)


def _count(node: Node, key: str) -> int:
    value = node.get(key, 0)
    return value if isinstance(value, int) else 0


def _listed_items(node: Node) -> list[Any]:
    """The schemas of the first items: `prefixItems`, or `items` in older drafts."""
    for key in ("prefixItems", "items"):
        if isinstance(node.get(key), list):
            found: list[Any] = node[key]
            return found
    return []


def _item(node: Node, index: int) -> Any:
    listed = _listed_items(node)
    if index < len(listed):
        return listed[index]
    return node.get("additionalItems" if isinstance(node.get("items"), list) else "items", True)


def _named(node: Node, key: str) -> Node:
    inside = node.get(key)
    return inside if isinstance(inside, dict) else {}
