"""The field `files` of `/generate`: uploads of a form, or their descriptions in JSON.

In JSON, and in fields of a form without a file, each of them is a string (a data URL, an `http(s)` address,
or the id of a stored file), or an object with one of `url`, `file_id` and `data` (base64), and optionally
`name` and `content_type`.
"""

from collections.abc import Mapping
from typing import Any, Final

from starlette.datastructures import UploadFile

from gateway.errors import InvalidParamError
from gateway.http.bodies import check_known
from gateway.media import sources
from gateway.media.sources import MediaSource, UploadedSource
from shared.validation_errors import described

_FROM: Final = ("url", "file_id", "data")
_NAMES: Final = (*_FROM, "name", "content_type")


def file_sources(found: object) -> list[MediaSource]:
    """Return the sources in the field; empty parts of a form count as absent.

    Raises:
        InvalidParamError: one is malformed.
    """
    given = found if isinstance(found, list) else [] if found is None else [found]
    files = [file for file in given if not _is_empty(file)]
    return [_source(f"files[{number}]", file) for number, file in enumerate(files)]


def _is_empty(file: object) -> bool:
    return not (file.filename or file.size) if isinstance(file, UploadFile) else file == ""


def _source(where: str, file: object) -> MediaSource:
    match file:
        case UploadFile():
            return UploadedSource(
                where=where,
                declared=file.content_type or "",
                name=sources.safe_name(file.filename),
                file=file.file,
            )
        case dict():
            return _of_object(where, file)
        case _:
            return sources.of_text(where, file)


def _of_object(where: str, file: Mapping[str, Any]) -> MediaSource:
    for key in file:
        check_known(key, _NAMES, f"{where}.")
    for field in ("name", "content_type"):
        if not isinstance(file.get(field, ""), str):
            raise InvalidParamError(
                f"{where}.{field}", f"{where}.{field}: expected a string, found {described(file[field])}"
            )
    given = [name for name in _FROM if file.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise InvalidParamError(where, f"{where}: expected one of {', '.join(_FROM)}, found {found}")
    value: Any = file[given[0]]
    name = file.get("name")
    if given == ["data"]:
        return sources.of_base64(f"{where}.data", value, declared=file.get("content_type", ""), name=name)
    return sources.of_text(f"{where}.{given[0]}", value, name=name)
