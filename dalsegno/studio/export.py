"""One HTML file with the pages and the data of some requests, which opens from a disk without a server.

The modules of the pages are put into one script, each in a function of its own, in the order of their
imports. A policy in the file allows this script and this style by their digests, and nothing else: the file
loads nothing, and a text in it cannot become a script.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from dalsegno.studio.recordings import Row
from dalsegno.studio.study import Study
from shared.errors import ClientError

STATIC: Final = Path(__file__).with_name("static")
MAX_RECORDS: Final = 20_000
"""Records in one file: a file has the state after each of them."""
ENTRY: Final = "app.js"
_IMPORT: Final = re.compile(r'^import (?:\{([^}]*)\}|\* as (\w+)) from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ((?:async )?function|class|const) (\w+)", re.MULTILINE)


def row_of(row: Row) -> dict[str, Any]:
    """A row of the list as JSON values."""
    return row.summary.plain() | {
        "source": row.source,
        "source_name": row.source_name,
        "start_ns": str(row.summary.start_ns),
        "seq": row.summary.seq,
    }


def document(rows: Sequence[Row], studies: Sequence[tuple[str, Study]], title: str) -> str:
    """Return the file.

    Args:
        rows: the list of its requests.
        studies: the requests, each with the id of its recording.
        title: of the document.

    Raises:
        ClientError: there are too many records for one file.
    """
    records = sum(len(study.history.records) for _, study in studies)
    if records > MAX_RECORDS:
        raise ClientError(
            f"expected at most {MAX_RECORDS:,} records for one file, found {records:,}: "
            "name fewer requests, or send the bundles"
        )
    data = _json({"answers": _answers(rows, studies), "media": _media(studies)})
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    script = bundled_script()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "media-src data:; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="content-security-policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{_escaped(title)}</title>
<style>{style}</style>
</head>
<body>
<noscript>This file needs JavaScript; all of it is inside.</noscript>
<script type="application/json" id="data">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def bundled_script() -> str:
    """The modules of the pages as one script.

    Raises:
        ValueError: a module has an import or an export that is not understood.
    """
    done: dict[str, str] = {}
    _add(ENTRY, done)
    entry = done.pop(ENTRY)
    parts = ["const modules = {};", *done.values(), entry]
    script = "\n".join(parts)
    if "</script" in script.lower() or "<!--" in script:
        raise ValueError("a module of the pages has an end of a script in a text")
    return script


def _add(name: str, done: dict[str, str]) -> None:
    """Add a module behind those that it imports."""
    if name in done:
        return
    text = (STATIC / name).read_text(encoding="utf-8")
    for _, _, other in _IMPORT.findall(text):
        _add(other, done)
    body = _IMPORT.sub(
        lambda found: f'const {found[2] or "{" + found[1] + "}"} = modules["{found[3]}"];\n', text
    )
    names = [found[1] for found in _EXPORT.findall(body)]
    body = _EXPORT.sub(r"\1 \2", body)
    if re.search(r"^(import|export)\b", body, re.MULTILINE):
        raise ValueError(f"{name} has an import or an export of another form")
    if name == ENTRY:
        done[name] = body
    else:
        done[name] = f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {", ".join(names)} }};\n}})();'


def _answers(rows: Sequence[Row], studies: Sequence[tuple[str, Study]]) -> dict[str, Any]:
    """The answers of the data by what was asked, source, request and number, a line each."""
    sources = {row.source: row.source_name for row in rows}
    bundles = [{"id": source, "name": name} for source, name in sources.items()]
    found: dict[str, Any] = {
        _key("sources"): {"log": None, "bundles": bundles},
        _key("requests"): {"rows": [row_of(row) for row in rows], "next": None},
    }
    for source, study in studies:
        at = source, study.request_id
        found[_key("request", *at)] = study.request()
        found[_key("decisions", *at)] = study.decisions()
        found[_key("events", *at)] = study.events(0, "", "", MAX_RECORDS)
        for place, record in enumerate(study.history.records):
            found[_key("event", *at, record.seq)] = study.event(record.seq)
            found[_key("state", *at, place)] = study.state(place)
    return found


def _media(studies: Sequence[tuple[str, Study]]) -> dict[str, str]:
    """The media of answers as addresses that contain them."""
    return {
        f"{source} {study.request_id} {number}": f"data:{one.content_type};base64,"
        f"{base64.b64encode(one.data).decode()}"
        for source, study in studies
        for number, one in enumerate(study.made)
        if one.data is not None
    }


def _key(what: str, source: str = "", request_id: str = "", number: int | str = "") -> str:
    return "\n".join((what, source, request_id, str(number)))


def _json(value: Any) -> str:
    """JSON in which nothing can end the element that contains it."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c").replace("&", "\\u0026")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
