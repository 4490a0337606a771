"""Take the rules of AsyncAPI's published schema, and leave its words, into `schema.json`.

npm install @asyncapi/specs
python -m tests.dalsegno.asyncapi_schema.extract 'node_modules/@asyncapi/specs/schemas/3.0.0-without-$id.json'
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

TARGET: Final = Path(__file__).with_name("schema.json")
_WORDS: Final = frozenset({"description", "examples", "example", "title", "$comment", "default"})
_BY_NAME: Final = frozenset({"properties", "patternProperties", "definitions"})


def rules(schema: Any, *, are_names: bool = False) -> Any:
    """A schema without its documentation; where keys are names of the author's, they all stay."""
    match schema:
        case dict():
            return {
                key: rules(value, are_names=key in _BY_NAME and not are_names)
                for key, value in schema.items()
                if are_names or key not in _WORDS
            }
        case list():
            return [rules(one) for one in schema]
        case _:
            return schema


if __name__ == "__main__":
    found = rules(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    told = {"$comment": "from @asyncapi/specs 6.11.1, Apache-2.0: see extract.py", **found}
    TARGET.write_text(json.dumps(told, separators=(",", ":")) + "\n", encoding="utf-8")
