"""What a process shows to the NATS server, told or in files."""

from pathlib import Path

import msgspec
import pytest

from configs.deployment import ConfigError, NatsSettings
from configs.nats_access import nats_credentials
from shared.log.nats import nkeys
from shared.log.nats.credentials import ANONYMOUS, CredentialsError


def test_the_token_may_be_in_a_file_and_the_one_told_wins(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("sesame\n")

    def shown(settings: NatsSettings) -> str | None:
        return nats_credentials(settings, "gateway").token

    assert nats_credentials(NatsSettings(), "gateway") == ANONYMOUS
    assert shown(NatsSettings(token_file=str(file))) == "sesame"
    assert shown(NatsSettings(token_file=str(file), token="simsim")) == "simsim"


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot read"), (b"\n", "is empty"), (b"\xff", "cannot read")]
)
@pytest.mark.parametrize("key", ["token_file", "credentials_file"])
def test_a_file_without_a_secret_is_told_and_not_taken_for_no_secret(
    content: bytes | None, said: str, key: str, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(ConfigError, match=f"nats.{key}: .*{said}"):
        nats_credentials(msgspec.convert({key: str(file)}, NatsSettings), "gateway")


def test_a_key_goes_before_a_password_and_a_password_before_a_token(tmp_path: Path) -> None:
    seed = nkeys.new_seed()
    file = tmp_path / "seed"
    file.write_text(f"{seed}\n")

    by_password = nats_credentials(NatsSettings(user="ada", password="simsim", token="sesame"), "gateway")
    by_key = nats_credentials(
        NatsSettings(credentials_file=str(file), user="ada", password="simsim", token="sesame"), "gateway"
    )

    assert (by_password.user, by_password.password, by_password.token) == ("ada", "simsim", None)
    assert (by_key.seed, by_key.user, by_key.password, by_key.token) == (seed, None, None, None)


def test_in_a_folder_each_role_finds_its_own_key(tmp_path: Path) -> None:
    seeds = {role: nkeys.new_seed() for role in ("gateway", "worker-0")}
    for role, seed in seeds.items():
        (tmp_path / f"{role}.nk").write_text(seed)
    settings = NatsSettings(credentials_file=str(tmp_path))

    for role, seed in seeds.items():
        assert nats_credentials(settings, role).seed == seed
    with pytest.raises(ConfigError, match=r"nats.credentials_file: cannot read .*worker-1\.nk"):
        nats_credentials(settings, "worker-1")


def test_half_of_a_pair_is_told() -> None:
    with pytest.raises(CredentialsError, match="both a NATS user and its password"):
        nats_credentials(NatsSettings(user="ada"), "gateway")
