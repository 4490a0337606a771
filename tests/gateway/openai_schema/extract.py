"""Write the needed parts of OpenAI's published schema into `schemas.json`, as JSON Schema 2020-12.

    python -m tests.gateway.openai_schema.extract openapi.json

The document is OpenAPI 3.1, but has `nullable: true`, which 3.1 does not have: it becomes a type.
Documentation is dropped, rules are kept. `tests.gateway.openai_schema.check` has the gateway's differences.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

ROOTS: Final = (
    "Batch",
    "ConversationItemList",
    "ConversationResource",
    "CreateChatCompletionResponse",
    "CreateChatCompletionStreamResponse",
    "CreateCompletionResponse",
    "DeletedConversationResource",
    "DeletedVideoResource",
    "ErrorResponse",
    "ImageEditCompletedEvent",
    "ImageEditPartialImageEvent",
    "ImageGenCompletedEvent",
    "ImageGenPartialImageEvent",
    "ImagesResponse",
    "ListBatchesResponse",
    "ListModelsResponse",
    "Model",
    "Response",
    "ResponseItemList",
    "ResponseStreamEvent",
    "SpeechAudioDeltaEvent",
    "SpeechAudioDoneEvent",
    "VideoListResource",
    "VideoResource",
)
TARGET: Final = Path(__file__).with_name("schemas.json")
_REF: Final = "#/components/schemas/"
_SAID: Final = frozenset({"description", "example", "title", "nullable", "deprecated", "default"})
_OF_DRAFT_2019: Final = frozenset({"$recursiveAnchor", "$recursiveRef"})
"""Keywords that 2020-12 does not have. A filter of hosted file search has them; no response here does."""


def main() -> None:
    document = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    TARGET.write_text(json.dumps(extract(document), indent=1, sort_keys=True) + "\n", encoding="utf-8")


def extract(document: dict[str, Any]) -> dict[str, Any]:
    """The needed schemas of OpenAI's document, and those they refer to, as `$defs`."""
    published = document["components"]["schemas"]
    found: dict[str, Any] = {}
    wanted = list(ROOTS)
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = folded(published[name])
            wanted += refers_to(found[name])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"from OpenAI's OpenAPI document, version {document['info']['version']}",
        "$defs": found,
    }


def folded(schema: Any) -> Any:
    """A schema with null as a type instead of `nullable`, and with references to `$defs`."""
    if isinstance(schema, list):
        return [folded(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    is_nullable = schema.get("nullable") is True
    plain = {
        key: _properties(value) if key == "properties" else folded(value)
        for key, value in schema.items()
        if key == "properties" or (key not in _SAID | _OF_DRAFT_2019 and not key.startswith("x-"))
    }
    if "$ref" in plain:
        plain["$ref"] = "#/$defs/" + str(plain["$ref"]).removeprefix(_REF)
    return {"anyOf": [plain, {"type": "null"}]} if is_nullable else plain


def _properties(named: dict[str, Any]) -> dict[str, Any]:
    """Properties by name: a name may be any word, `description` too."""
    return {name: folded(schema) for name, schema in named.items()}


def refers_to(schema: Any) -> list[str]:
    """The names of the schemas that a folded schema refers to."""
    match schema:
        case {"$ref": str(ref)}:
            return [ref.removeprefix("#/$defs/")]
        case dict():
            return [name for value in schema.values() for name in refers_to(value)]
        case list():
            return [name for value in schema for name in refers_to(value)]
        case _:
            return []


if __name__ == "__main__":
    main()
