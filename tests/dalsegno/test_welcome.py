from pathlib import Path

import pytest

from dalsegno.address import Listen
from dalsegno.welcome import welcome


def test_what_is_shown_names_the_address_the_model_and_the_data_dir() -> None:
    shown = welcome("demo", Listen(host="0.0.0.0", port=9000), Path("/data"), seconds=5.02)
    assert "Dal Segno serves demo at http://127.0.0.1:9000 (ready after 5.0 s)" in shown
    assert 'ask "What does len do?" --url http://127.0.0.1:9000\n' in shown
    assert 'base_url="http://127.0.0.1:9000/v1"' in shown
    assert "Data dir: /data\n" in shown


def test_at_the_usual_port_ask_needs_no_url(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = welcome("demo", Listen(host="127.0.0.1", port=8000), Path("/data"), seconds=5)
    assert "--url" not in shown
