import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs" / "walks.md"


def test_every_example_of_the_page_holds() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == PAGE.read_text(encoding="utf-8").count("```") // 2  # none is skipped
    names: dict[str, Any] = {"__name__": "walks"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # the blocks build on one another
    assert {"image", "sound", "cascade"} <= names.keys()
