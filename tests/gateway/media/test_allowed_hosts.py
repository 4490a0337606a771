"""The list of hosts, and the addresses that a listed host may have."""

from ipaddress import ip_address

import pytest

from gateway.media.allowed_hosts import AllowedHosts

PUBLIC = "93.184.215.14"


@pytest.mark.parametrize(
    ("entries", "host", "port", "allowed"),
    [
        ([], "a.example", 443, False),
        (["a.example"], "a.example", 443, True),
        (["A.Example."], "a.example", 443, True),
        (["a.example"], "b.a.example", 443, False),
        (["a.example"], "a.example.evil.example", 443, False),
        (["*.example"], "a.b.example", 443, True),
        (["*.example"], "example", 443, False),
        (["*.example"], "evilexample", 443, False),
        (["*"], "anything.org", 80, True),
        (["Bücher.example"], "xn--bcher-kva.example", 443, True),
        (["xn--bcher-kva.example"], "xn--bcher-kva.example", 443, True),
        (["*.bücher.example:80"], "a.xn--bcher-kva.example", 80, True),
        (["faß.example"], "fass.example", 80, False),
        (["a.example:8080"], "a.example", 8080, True),
        (["a.example:8080"], "a.example", 80, False),
        (["[::1]:80"], "::1", 80, True),
        (["127.0.0.1"], "127.0.0.1", 8123, True),
    ],
)
def test_a_host_is_allowed_by_name(entries: list[str], host: str, port: int, allowed: bool) -> None:
    assert AllowedHosts(entries).allows(host, port) is allowed


@pytest.mark.parametrize(
    "entry", ["", "*a.example", "a.*.example", "http://a.example", "a.example/x", "a:0", "a:x"]
)
def test_a_malformed_entry_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="expected a"):
        AllowedHosts([entry])


@pytest.mark.parametrize(
    ("entry", "host", "address", "allowed"),
    [
        ("a.example", "a.example", PUBLIC, True),
        ("*", "a.example", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        # private networks only for a host that is listed by name, such as host.docker.internal
        ("host.docker.internal", "host.docker.internal", "192.168.65.254", True),
        ("host.docker.internal", "host.docker.internal", "172.17.0.1", True),
        ("*.internal", "host.docker.internal", "192.168.65.254", False),
        ("*", "a.example", "10.0.0.1", False),
        ("*", "a.example", "fd00::1", False),
        # loopback only for localhost
        ("localhost", "localhost", "127.0.0.1", True),
        ("localhost", "localhost", "::1", True),
        ("a.example", "a.example", "127.0.0.1", False),
        ("*", "localhost", "127.0.0.1", False),
        # anything else only if the address itself is listed
        ("a.example", "a.example", "169.254.169.254", False),
        ("*", "169.254.169.254", "169.254.169.254", False),
        ("169.254.169.254", "169.254.169.254", "169.254.169.254", True),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", True),
        ("a.example", "a.example", "0.0.0.0", False),
        ("a.example", "a.example", "224.0.0.1", False),
        ("a.example", "a.example", "100.64.0.1", False),
        ("a.example", "a.example", "fe80::1", False),
        ("a.example", "a.example", "ff02::1", False),
        ("*", "a.example", "fec0::1", False),
        ("a.example", "a.example", "::", False),
        # an IPv4 address inside of an IPv6 one
        ("*", "a.example", "::ffff:127.0.0.1", False),
        ("*", "a.example", "::ffff:10.0.0.1", False),
        ("*", "a.example", "64:ff9b::7f00:1", False),
        ("*", "a.example", "64:ff9b::a9fe:a9fe", False),
        ("*", "a.example", "2002:7f00:1::", False),
        ("*", "a.example", f"::ffff:{PUBLIC}", True),
    ],
)
def test_an_address_is_allowed_by_its_kind(entry: str, host: str, address: str, allowed: bool) -> None:
    assert AllowedHosts([entry]).allows_address(host, 80, ip_address(address)) is allowed
