"""An option that is not given says nothing, and what the help calls the default is the configuration's."""

import click
import pytest

from dalsegno.cli import main
from dalsegno.config import options
from dalsegno.config.layers import KEYS
from dalsegno.config.resolve import FLAGS

CONFIGURED = ("serve", "config", "gateway", "conductor", "worker")


def options_of(name: str) -> dict[str, click.Option]:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return {one.name or "": one for one in command.params if isinstance(one, click.Option)}


@pytest.mark.parametrize(
    "said",
    [
        ["serve", "demo"],
        ["config", "demo"],
        ["gateway", "--config", "demo"],
        ["conductor", "--config", "demo"],
        ["worker", "--config", "demo"],
        ["provision"],
        ["log"],
        ["replay", "--all"],
    ],
)
def test_what_is_not_told_has_no_default_that_beats_file_or_environment(said: list[str]) -> None:
    name, *args = said
    command = main.get_command(click.Context(main), name)
    assert command is not None

    found = command.make_context(name, args).params

    assert not {key: value for key, value in found.items() if key in FLAGS and value is not None}


@pytest.mark.parametrize("command", CONFIGURED)
def test_the_default_in_the_help_is_the_configurations(command: str) -> None:
    told = options_of(command)
    assert "set_" in told
    for name, option in told.items():
        if name in FLAGS and isinstance(option.show_default, str):
            assert option.show_default == str(KEYS[FLAGS[name]].default)


def test_a_flag_of_its_own_wins_over_set_and_is_known_by_its_name() -> None:
    told = options.settings_in({"set_": ("gateway.port=1", "logs.level=debug"), "port": 2, "host": None})

    assert [(one.key, one.value, one.source) for one in told] == [
        ("gateway.port", 1, "--set"),
        ("logs.level", "debug", "--set"),
        ("gateway.port", 2, "--port"),
    ]


def test_what_is_no_configuration_is_left_to_the_command() -> None:
    told = {"model": "demo", "parent": None, "set_": (), "port": 1}
    options.settings_in(told)

    assert told == {"model": "demo", "parent": None}
