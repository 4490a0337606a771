"""The containers' files fit the code they run; that they run is tried by `deploy/smoke.sh`, with Docker."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import click
import pytest
import yaml

from configs.deployment import GatewaySettings
from dalsegno.cli import main
from dalsegno.config import environment
from dalsegno.config.layers import KEYS
from shared.log.nats.private_server import nats_server_binary

ROOT: Final = Path(__file__).parents[2]
DEPLOY: Final = ROOT / "deploy"
FILE: Final = (DEPLOY / "docker-compose.yml").read_text(encoding="utf-8")
README: Final = (DEPLOY / "README.md").read_text(encoding="utf-8")
DOCKERFILE: Final = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
SERVICES: Final[dict[str, Any]] = yaml.safe_load(FILE)["services"]
ROLES: Final = {
    name: service
    for name, service in SERVICES.items()
    if service["image"].startswith("dalsegno:") and "entrypoint" not in service
}
_VARIABLE: Final = re.compile(r"\$\{([A-Z_]+)(?:(:?-)([^}]*))?\}")


def substituted(text: str, **environment: str) -> str:
    """As Compose reads it."""

    def value(match: re.Match[str]) -> str:
        name, sign, default = match.groups()
        said = environment.get(name)
        return default or "" if said is None or (sign == ":-" and not said) else said

    return _VARIABLE.sub(value, text)


def services(**environment: str) -> dict[str, Any]:
    told: dict[str, Any] = yaml.safe_load(substituted(FILE, **environment))["services"]
    return told


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


@pytest.mark.parametrize("name", ROLES)
def test_the_command_of_every_role_is_one_of_ours(name: str) -> None:
    command, *arguments = services()[name]["command"]
    found = main.get_command(click.Context(main), command)

    assert found is not None
    found.make_context(command, arguments)


def test_a_command_that_is_not_ours_would_be_found() -> None:
    found = main.get_command(click.Context(main), "worker")

    assert found is not None
    with pytest.raises(click.UsageError):
        found.make_context("worker", ["--config", "demo", "--rnak", "0"])


@pytest.mark.parametrize("model", ["", "/models/Qwen3-8B"])
def test_every_role_serves_the_one_model_and_mounts_it_under_its_own_path(model: str) -> None:
    told = services(MODEL=model)
    serving = [told[name] for name in ROLES if name not in {"provision", "studio"}]

    assert len(serving) == 5
    for service in serving:
        assert service["command"][service["command"].index("--config") + 1] == (model or "demo")
        assert f"{model or 'nothing'}:{model or '/nothing'}:ro" in service["volumes"]


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_a_rank_has_one_worker_whatever_the_profile(profile: str) -> None:
    ranks = [
        service["command"][service["command"].index("--rank") + 1]
        for service in ROLES.values()
        if service["command"][0] == "worker" and profile in service["profiles"]
    ]

    assert ranks == ["0"]


def test_a_second_rank_shares_memory_with_the_first_and_is_reached_under_its_own_name() -> None:
    first, second = SERVICES["worker"], SERVICES["worker-1"]

    assert second["command"] == [*first["command"][:2], "1", *first["command"][3:]]
    assert (first["ipc"], second["ipc"]) == ("shareable", "service:worker")
    for name in ("worker", "worker-1"):
        told = SERVICES[name]["environment"]
        assert told["DALSEGNO_DATA_PLANE_ADDRESS"] == name
        assert told["DALSEGNO_DATA_PLANE_MEMORY"] == "named"
        assert told["DALSEGNO_NATS_URL"] == "nats://nats:4222"


def test_without_a_word_the_profile_is_the_cpus() -> None:
    assert "COMPOSE_PROFILES=cpu" in (DEPLOY / ".env").read_text(encoding="utf-8").splitlines()


def test_what_the_roles_are_told_by_environment_are_keys_of_the_configuration() -> None:
    variables = {key.variable for key in KEYS.values()}
    for service in ROLES.values():
        assert set(service["environment"]) - {environment.CACHE_HOME} <= variables


def test_what_a_gateway_depends_on_stops_after_its_streams() -> None:
    gateway = SERVICES["gateway"]

    assert {"conductor", "worker", "worker-1", "worker-gpu"} <= set(gateway["depends_on"])
    assert seconds(gateway["stop_grace_period"]) > GatewaySettings().drain_s


def test_nothing_runs_before_what_it_needs() -> None:
    for name, service in ROLES.items():
        before = {"nats": "service_healthy"}
        if name != "provision":
            before["provision"] = "service_completed_successfully"
        assert (
            before.items()
            <= {needed: how["condition"] for needed, how in service["depends_on"].items()}.items()
        )
    assert SERVICES["nats"]["depends_on"] == {"token": {"condition": "service_completed_successfully"}}


def test_only_loopback_is_published_unless_told_otherwise() -> None:
    ports = [port for service in services().values() for port in service.get("ports", [])]

    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert "ports" not in SERVICES["nats"]


def test_nobody_may_do_more_than_needed() -> None:
    for service in SERVICES.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "privileged" not in service
    assert "\nUSER 10001:10001\n" in DOCKERFILE


def test_every_mounted_file_and_volume_is_there() -> None:
    volumes = yaml.safe_load(FILE)["volumes"]
    for service in services().values():
        for source in (volume.partition(":")[0] for volume in service.get("volumes", [])):
            assert source in volumes or (DEPLOY / source).exists(), source
        for file in service.get("env_file", []):
            assert (DEPLOY / file).is_file()


# ---- NATS --------------------------------------------------------------------------------------------


def make_token(folder: Path, said: str = "") -> str:
    """What the service `token` does, in `folder`."""
    token = SERVICES["token"]
    assert token["entrypoint"] == ["python3", "-c"]
    command = [sys.executable, "-c", *(one.replace("$$", "$") for one in token["command"])]
    subprocess.run(command, cwd=folder, env={"DALSEGNO_NATS_TOKEN": said}, check=True)
    return (folder / "token").read_text(encoding="utf-8")


@pytest.mark.processes
def test_the_token_is_made_once_and_read_by_nobody_else(tmp_path: Path) -> None:
    made = make_token(tmp_path)

    assert len(made) >= 32
    assert make_token(tmp_path) == made
    assert make_token(tmp_path, said='of "mine"') == 'of "mine"'
    assert {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {
        "token": 0o600,
        "authorization.conf": 0o600,
    }


@pytest.mark.processes
@pytest.mark.parametrize("said", ["", 'with "quotes" and a \\'])
def test_nats_takes_its_configuration(said: str, tmp_path: Path) -> None:
    folder = tmp_path / "token"
    folder.mkdir()
    make_token(folder, said)

    assert checked(tmp_path).returncode == 0


@pytest.mark.processes
def test_nats_takes_no_configuration_without_a_token(tmp_path: Path) -> None:
    told = checked(tmp_path)

    assert told.returncode != 0
    assert "authorization.conf" in told.stderr


def checked(folder: Path) -> subprocess.CompletedProcess[str]:
    """NATS' own word on our configuration file, put into `folder` as the container has it."""
    file = folder / "nats.conf"
    file.write_bytes((DEPLOY / "nats.conf").read_bytes())
    command = [str(nats_server_binary()), "-t", "--config", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# ---- the image ---------------------------------------------------------------------------------------


def test_the_image_gets_every_package_and_the_build_sees_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()

    for package in packages:
        assert f"COPY {package} {package}" in DOCKERFILE
        assert f"!{package}" in ignored


def test_every_variable_is_in_the_readmes_table() -> None:
    table = [line.split("|")[1] for line in README.splitlines() if line.startswith("| `")]
    told = set(re.findall(r"`([A-Z_]+)`", "".join(table)))
    used = {match.group(1) for match in _VARIABLE.finditer(FILE)}

    assert told == used | {"COMPOSE_PROFILES"}


def test_the_defaults_are_those_of_the_readmes_table() -> None:
    told = dict(re.findall(r"^\| `([A-Z_]+)` \| `([^`]+)` \|", README, re.MULTILINE))
    defaults = {match.group(1): match.group(3) for match in _VARIABLE.finditer(FILE)}

    assert len(told) >= 5
    assert {name: defaults.get(name, "cpu") for name in told} == told


def test_every_variable_the_build_is_given_is_one_it_reads() -> None:
    given = set(SERVICES["token"]["build"]["args"])

    assert given <= set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))


@pytest.mark.processes
@pytest.mark.parametrize("script", ["smoke.sh"])
def test_the_scripts_can_be_read_by_bash(script: str) -> None:
    subprocess.run(["bash", "-n", DEPLOY / script], check=True)


def test_grafanas_and_prometheus_files_can_be_read() -> None:
    for file in DEPLOY.glob("**/*.yml"):
        assert isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), dict), file
    for file in DEPLOY.glob("grafana/**/*.json"):
        assert isinstance(json.loads(file.read_text(encoding="utf-8")), dict), file
