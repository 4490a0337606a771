"""Many concurrent requests: no answer depends on the others, and every request can be replayed."""

from pathlib import Path

import pytest

from tests.e2e import clients, deploy
from tests.e2e.deploy import Running
from tests.tiny import tiny_checkpoint

CLIENTS = 64
REQUESTS = 200

BUILTINS = [
    "abs",
    "all",
    "any",
    "ascii",
    "bin",
    "bool",
    "bytes",
    "callable",
    "chr",
    "compile",
    "complex",
    "delattr",
    "dict",
    "dir",
    "divmod",
    "enumerate",
    "eval",
    "exec",
    "filter",
    "float",
    "format",
    "frozenset",
    "getattr",
    "globals",
    "hasattr",
    "hash",
    "help",
    "hex",
    "id",
    "input",
    "int",
    "isinstance",
    "issubclass",
    "iter",
    "len",
    "list",
    "locals",
    "map",
    "max",
    "memoryview",
    "min",
    "next",
    "object",
    "oct",
    "open",
    "ord",
    "pow",
    "print",
    "property",
    "range",
    "repr",
    "reversed",
    "round",
    "set",
    "setattr",
    "slice",
    "sorted",
    "staticmethod",
    "str",
    "sum",
    "super",
    "tuple",
    "type",
    "vars",
    "zip",
]


def questions(number: int) -> list[str]:
    """Distinct requests of several lengths."""
    asked = [
        f"{'Please. ' * (turn % 4)}What does {name} do?"
        for turn in range(-(-number // len(BUILTINS)))
        for name in BUILTINS
    ]
    assert len(set(asked[:number])) == number
    return asked[:number]


@pytest.mark.parametrize("served", ["demo", "random"])
async def test_each_of_64_concurrent_answers_is_the_one_it_gets_alone(
    served: str, deployment: Running, random_deployment: Running
) -> None:
    running = deployment if served == "demo" else random_deployment
    texts = questions(CLIENTS)
    params = {"temperature": 0, "max_tokens": 24, "ignore_eos": served == "random"}
    async with clients.http(running) as http:
        alone = await clients.answers(http, texts, "alone", at_once=1, **params)
        together = await clients.answers(http, texts, "together", at_once=CLIENTS, **params)
    assert [answer.told for answer in together] == [answer.told for answer in alone]
    assert len({answer.text for answer in alone}) > CLIENTS // 2  # or equality would say nothing
    assert all(answer.token_ids for answer in alone)


@pytest.mark.slow
async def test_200_requests_are_each_replayed_from_the_running_log_and_at_rest(tmp_path: Path) -> None:
    with deploy.serve(tmp_path, model=str(tiny_checkpoint("qwen3"))) as running:
        async with clients.http(running) as http:
            answers = await clients.answers(
                http, questions(REQUESTS), "many", at_once=CLIENTS, temperature=0.9, max_tokens=16
            )
        requests = {answer.request_id for answer in answers}
        of_running = clients.run("replay", "--all", "--json", "--data-dir", str(running.data_dir))
        assert running.stop() == 0
    at_rest = clients.run("replay", "--all", "--json", "--data-dir", str(running.data_dir))
    for replayed in (of_running, at_rest):
        assert replayed.returncode == 0, replayed.stdout
        found = clients.verdicts(replayed)
        assert found.keys() == requests
        assert all(verdict["matches"] for verdict in found.values())
        assert {verdict["phase"] for verdict in found.values()} == {"finished"}
        assert {verdict["decided"] for verdict in found.values()} == {3}  # two orders and the end
