"""Credentials for a NATS server, and their absence from all output."""

import base64
import pickle
import traceback
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from shared.log.nats import nkeys
from shared.log.nats.credentials import ANONYMOUS, Credentials, CredentialsError
from tests.hostile import NO_TOKENS

SEED = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"
PUBLIC = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"
"""The pair in NATS' own documentation."""


# ---- nkeys -----------------------------------------------------------------------------------------
def test_a_seed_has_the_public_key_that_nats_says() -> None:
    assert nkeys.public_key(SEED) == PUBLIC


def test_a_new_seed_is_a_users_and_nobody_elses() -> None:
    seeds = {nkeys.new_seed() for _ in range(100)}

    assert len(seeds) == 100
    assert all(seed.startswith("SU") and len(seed) == 58 for seed in seeds)
    assert all(nkeys.public_key(seed).startswith("U") for seed in seeds)


def test_what_is_signed_can_be_verified_with_the_public_key() -> None:
    raw = base64.b32decode(PUBLIC)[1:33]
    signature = base64.b64decode(nkeys.sign(SEED, "a challenge"))

    Ed25519PublicKey.from_public_bytes(raw).verify(signature, b"a challenge")


@pytest.mark.parametrize(
    ("seed", "said"),
    [
        ("", "complete"),
        ("sesame", "capital letters"),
        (SEED[:-1], "complete|capital letters"),
        (SEED[:-1] + "A", "checksum"),
        (SEED[:10] + "A" + SEED[11:], "checksum"),
        (PUBLIC, "another type"),
        # An account's, from the same documentation's page.
        ("SAANWFZ3JINNPERWT3ALE45U7GYT2ZDW6GJUIVPDKUF6GKAX6AISZJMAS4", "another type|checksum"),
        ("ü", "capital letters"),
    ],
)
def test_what_is_no_users_seed_is_refused_and_not_repeated(seed: str, said: str) -> None:
    with pytest.raises(CredentialsError, match=said) as caught:
        Credentials(seed=seed)
    assert not seed or seed not in "".join(traceback.format_exception(caught.value))


# ---- credentials -----------------------------------------------------------------------------------
def test_no_repr_holds_a_secret() -> None:
    for shown, secret in (
        (Credentials(token="sesame"), "sesame"),
        (Credentials(user="ada", password="simsim"), "simsim"),
        (Credentials(seed=SEED), SEED),
    ):
        assert secret not in f"{shown!r} {shown} {shown.description}"
        assert secret in shown.as_dict().values()


def test_each_has_a_place_for_answers_that_is_its_own() -> None:
    assert ANONYMOUS.inbox_prefix == Credentials(token="sesame").inbox_prefix == "_INBOX"
    assert Credentials(user="ada", password="simsim").inbox_prefix == "_INBOX_ada"
    for name in NO_TOKENS.values():
        assert Credentials(user=name, password="simsim").inbox_prefix == "_INBOX"
    assert Credentials(seed=SEED).inbox_prefix == f"_INBOX_{PUBLIC}"


def test_another_value_of_the_same_is_made_of_what_is_told() -> None:
    shown = Credentials(seed=SEED, ca_file="/ca")

    assert Credentials(**shown.as_dict()) == shown
    assert pickle.loads(pickle.dumps(shown)) == shown


@pytest.mark.parametrize(
    "half", [{"user": "ada"}, {"password": "simsim"}, {"cert_file": "/cert"}, {"key_file": "/key"}]
)
def test_half_of_a_pair_is_refused(half: dict[str, str]) -> None:
    with pytest.raises(CredentialsError, match="expected both"):
        Credentials(**half)


def test_tls_is_asked_for_where_an_authority_or_a_certificate_is_named(tmp_path: Path) -> None:
    assert ANONYMOUS.tls() is None
    with pytest.raises(CredentialsError, match=f"cannot use {tmp_path / 'none'} for TLS"):
        Credentials(ca_file=str(tmp_path / "none")).tls()
