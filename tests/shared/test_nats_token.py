"""The token of the NATS server, told or in a file."""

from pathlib import Path

import pytest

from shared.config import ConfigError, NatsSettings, nats_token


def test_the_token_may_be_in_a_file_and_the_one_told_wins(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("sesame\n")

    assert nats_token(NatsSettings()) is None
    assert nats_token(NatsSettings(token_file=str(file))) == "sesame"
    assert nats_token(NatsSettings(token_file=str(file), token="simsim")) == "simsim"


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot read"), (b"\n", "is empty"), (b"\xff", "cannot read")]
)
def test_a_file_without_a_token_is_told_and_not_taken_for_no_token(
    content: bytes | None, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(ConfigError, match=f"nats.token_file: .*{said}"):
        nats_token(NatsSettings(token_file=str(file)))
