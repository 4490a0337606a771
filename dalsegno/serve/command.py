"""`dalsegno serve`: the command."""

import sys
from pathlib import Path
from typing import Any

import click

from dalsegno.config import options


@click.command()
@click.argument("model")
@options.of_serve
@click.option(
    "--quantize",
    type=click.Choice(("int8", "int4", "fp8")),
    help="Round the weights to so many bits while they are loaded (fp8: on a GPU): less memory, faster "
    "answers, other ones.",
)
@click.option(
    "--kv-cache",
    type=click.Choice(("int8",)),
    help="Round keys and values to eight bits, on a CPU: half the memory of bfloat16, other answers.",
)
@click.option(
    "--ready-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Receives addresses, NATS credentials and process ids as JSON once the deployment is ready.",
)
@click.option(
    "--profile",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Receives a timeline of all processes, for ui.perfetto.dev, after they have ended.",
)
def serve(
    model: str,
    quantize: str | None,
    kv_cache: str | None,
    ready_file: Path | None,
    profile: Path | None,
    **flags: Any,
) -> None:
    """Serve MODEL on this machine, with every process it needs, supervised.

    MODEL is a name in configs/ (try `demo`), a YAML file, a folder with a Hugging Face checkpoint,
    a GGUF file, or a model on the Hugging Face hub: org/name, or org/name@revision.
    """
    from dalsegno.exit_status import EX_CONFIG
    from dalsegno.serve import assembly
    from dalsegno.serve.options import ServeOptions
    from dalsegno.serve.supervisor import RefusedError

    for key, value in (("quantize", quantize), ("kv_cache", kv_cache)):
        if value is not None:
            flags["set_"] = (*flags["set_"], f"model_kwargs.{key}={value}")
    settings = options.settings_in(flags)
    try:
        assembly.serve(ServeOptions(model=model, settings=settings, ready_file=ready_file, profile=profile))
    except RefusedError as error:
        click.echo(f"Error: {error.message}", err=True)
        sys.exit(EX_CONFIG)
