"""`dalsegno check MODEL`: validates a configuration and shows its placement, without starting it.

    node          engine     walks       ranks  device
    LLM           kv         prefill     0      cuda:0
    LLM           kv         decode      1      cuda:1

The table is followed by the ranks as boxes with the links between them, notes, and warnings of slow or
failing parts. Exit status 0, or 78 (as of a role that can never run as configured) with one line that says
what is wrong.
"""

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

from configs.deployment import ConfigError, DeploymentConfig
from configs.placement import absent_nodes
from dalsegno.check import layout, memory_need
from dalsegno.check.layout import Link, NodePlacement
from dalsegno.check.memory_need import MemoryNeed
from dalsegno.config import options, resolve
from dalsegno.exit_status import EX_CONFIG
from dalsegno.hub.errors import HubUnavailableError
from dalsegno.terminal import sequence_diagram, tables
from dalsegno.terminal.sequence_diagram import WIDTH, Arrow, Box
from dalsegno.terminal.tables import Column
from models import options as model_options
from models import registry
from models.base import EngineKind, ModelGraph
from models.checkpoints import hub_cache
from models.checkpoints.files import read_language_config
from shared.errors import ClientError

_SHAFTS: Final = {"edge": "─", "kept": "─", "kv": "═", "stream": "┄"}
_LEGEND: Final = {
    "─": "─ tensors",
    "═": "═ keys and values",
    "┄": "┄ a stream, while both run",
}
_TEXT_ONLY: Final = ("text",)
_BOUNDS: Final = {
    "minimum": "from",
    "exclusiveMinimum": "above",
    "maximum": "to",
    "exclusiveMaximum": "below",
}
"""The words for bounds in JSON schemas."""
_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
_BYTES_OF_SCALE: Final = 4
"""Of the keys, and of the values, of a head in eight bits."""
_COLUMNS: Final = ("node", "engine", "walks", "ranks", "device")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of checking a configuration.

    Attributes:
        devices: by rank; `auto` if it cannot be determined here.
        notes: useful facts.
        warnings: parts that will be slow, or will not work here.
        is_for_here: this machine has the devices, the address and the libraries.
        tokenizer_fits: the tokenizer was checked here; an unsuitable one is refused.
        memory: what the weights and the KV cache need; None if unknown.
        model_fits: the same for the model, by its `config.json`; also False if the family cannot check it.
    """

    config: DeploymentConfig
    graph: ModelGraph
    node_placements: list[NodePlacement]
    links: list[Link]
    places: list[tuple[int, ...]]
    devices: Mapping[int, str]
    notes: list[str]
    warnings: list[str]
    is_for_here: bool
    tokenizer_fits: bool
    model_fits: bool
    memory: MemoryNeed | None = None


class _CheckRefusal(click.ClickException):
    exit_code = EX_CONFIG


@click.command()
@click.argument("model")
@options.of_serve
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def check(model: str, *, as_json: bool, **given: Any) -> None:
    """Check if MODEL can be served, and show its placement.

    MODEL is a name in configs/, a YAML file, a folder with a Hugging Face checkpoint, a GGUF file, or a
    model on the Hugging Face hub (org/name), of which only the configuration is downloaded. Nothing is
    started; the tokenizer is read if it is there, the model is built without memory, and of weights only the
    headers are read. The exit status is 0, or 78 if MODEL cannot be served.
    """
    try:
        found = resolve.effective(model, options.settings_in(given), with_weights=False)
        resolve.check(found)
        report = examine(found.config, memory_need.of(found.config, kv_bytes=_kv_bytes(found.config)))
    except (ClientError, HubUnavailableError) as error:
        if as_json:
            click.echo(json.dumps({"ok": False, "code": error.code, "error": error.message}))
            raise SystemExit(EX_CONFIG) from None
        raise _CheckRefusal(error.message) from error
    if as_json:
        click.echo(json.dumps(as_data(report), ensure_ascii=False))
    else:
        click.echo("\n".join(lines(report)))


def examine(config: DeploymentConfig, memory: MemoryNeed | None = None) -> Report:
    """Check `config`, including this machine's devices and network.

    Raises:
        CheckpointError: the tokenizer does not fit the family, or a worker would refuse the model.
        ConfigError: the family's nodes cannot be placed so.
    """
    graph, groups = registry.graph(config.model), config.groups
    graph = graph.without(absent_nodes(groups, graph))
    tokenizer_fits, model_fits = _tokenizer_fits(config), _model_fits(config)
    devices, problems = _devices(config)
    problems += _network(config)
    node_placements, links = layout.node_placements(graph, groups), layout.links(graph, groups)
    problems += _attention(config, node_placements, devices)
    return Report(
        config=config,
        graph=graph,
        node_placements=node_placements,
        links=links,
        places=layout.places(groups),
        devices=devices,
        notes=[
            *_remarks(graph, config),
            *_shared(devices),
            *_replicas(node_placements),
            *_tp_groups(config),
            *_room(graph, config),
        ],
        warnings=[*problems, *_kv_moves(config, links), *_loops(graph, config)],
        is_for_here=not problems,
        tokenizer_fits=tokenizer_fits,
        model_fits=model_fits,
        memory=memory,
    )


def lines(report: Report) -> Iterator[str]:
    """The report as text, at most 80 columns wide."""
    config, ranks = report.config, report.config.ranks
    yield f"{config.name}: {config.model} on {_counted(len(ranks), 'rank')}, max_seq_len {config.max_seq_len}"
    yield f"checkpoint {config.checkpoint}"
    if (on_hub := hub_cache.origin(Path(config.checkpoint))) is not None:
        yield f"revision {on_hub.repository}@{on_hub.revision}"
    yield ""
    yield from _table(report)
    yield ""
    arrows = list(_arrows(report))
    yield from sequence_diagram.draw(list(_boxes(report)), arrows)
    if arrows:
        yield ""
        yield "   ".join(text for shaft, text in _LEGEND.items() if any(one.shaft == shaft for one in arrows))
    yield ""
    for stream in _streams(report):
        yield from _hanging("stream", stream)
    if report.graph.modalities != _TEXT_ONLY:
        modalities = f"{', '.join(report.graph.modalities)}; gives {', '.join(report.graph.outputs)}"
        yield from _hanging("takes", modalities)
    for option in options_in_words(report.graph):
        yield from _hanging("option", option)
    for need in report.memory.in_words(config.max_seq_len) if report.memory is not None else ():
        yield from _hanging("memory", need)
    for note in report.notes:
        yield from _hanging("note", note)
    for warning in report.warnings:
        yield from _hanging("warning", warning)
    seen = {"model": report.model_fits, "tokenizer": report.tokenizer_fits}
    unchecked = ", ".join(what for what, fits in seen.items() if not fits)
    unchecked = f"{unchecked} and weights" if unchecked else "weights"
    where = "" if report.is_for_here else ", though not for this machine"
    yield from _hanging("ok", f"the placement is right{where}; {unchecked} are looked at when it starts")


def as_data(report: Report) -> dict[str, Any]:
    """The report as JSON values."""
    config = report.config
    return {
        "ok": True,
        "name": config.name,
        "model": config.model,
        "checkpoint": config.checkpoint,
        "revision": str(hub_cache.origin(Path(config.checkpoint)) or "") or None,
        "memory": report.memory.as_data() if report.memory is not None else None,
        "max_seq_len": config.max_seq_len,
        "input_modalities": list(report.graph.modalities),
        "output_modalities": list(report.graph.outputs),
        "options": model_options.schema(report.graph.options),
        "ranks": [
            {"rank": rank, "device": report.devices[rank], "nodes": config.nodes_of(rank)}
            for rank in config.ranks
        ],
        "nodes": [
            {
                "node": one.node,
                "engine": str(one.engine),
                "walks": one.walks,
                "ranks": one.ranks,
                "puts_out": one.puts_out,
            }
            for one in report.node_placements
        ],
        "links": [
            {
                "kind": one.kind,
                "name": one.name,
                "from": {"walk": one.source[0], "node": one.source[1], "ranks": one.sources},
                "to": {"walk": one.target[0], "node": one.target[1], "ranks": one.targets},
                **({"chunks": one.chunks} if one.chunks else {}),
            }
            for one in report.links
        ],
        "notes": report.notes,
        "warnings": report.warnings,
    }


def options_in_words(graph: ModelGraph) -> Iterator[str]:
    """Yield the family's own request parameters, such as `steps, integer from 1, default 10: its meaning`."""
    for name, schema in model_options.schema(graph.options)["properties"].items():
        default = json.dumps(schema.get("default"))
        yield f"{name}, {_kind_of(schema)}, default {default}: {schema['description']}"


def _kind_of(schema: Mapping[str, Any]) -> str:
    """The type and the bounds of a JSON schema, in words."""
    kinds = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    return " or ".join(_scalar_kind(one) for one in kinds)


def _scalar_kind(schema: Mapping[str, Any]) -> str:
    if values := schema.get("enum"):
        return f"one of {', '.join(map(str, values))}"
    bounds = (f"{_BOUNDS[key]} {schema[key]}" for key in _BOUNDS if key in schema)
    return " ".join([str(schema.get("type", "value")), *bounds])


# ---- text output -------------------------------------------------------------------------------------


def _table(report: Report) -> list[str]:
    rows = [
        (
            one.node,
            str(one.engine),
            ", ".join(one.walks),
            ", ".join("+".join(map(str, members)) for members in _members(report.config, one)),
            ", ".join(
                dict.fromkeys(
                    report.devices[rank] for members in _members(report.config, one) for rank in members
                )
            ),
        )
        for one in report.node_placements
    ]
    return tables.fitted_lines([Column(title) for title in _COLUMNS], rows, WIDTH)


def _members(config: DeploymentConfig, one: NodePlacement) -> list[tuple[int, ...]]:
    """The ranks of each replica of a node: several if a TP group shares it."""
    return [config.tp_group_of(rank) if one.engine is EngineKind.KV else (rank,) for rank in one.ranks]


def _boxes(report: Report) -> Iterator[Box]:
    for ranks in report.places:
        here = [one for one in report.node_placements if {*one.ranks} & {*ranks}]
        copies = [report.config.tp_group_of(rank) for rank in ranks]
        several = len(copies) > 1 or len(copies[0]) > 1
        yield Box(
            title=f"rank{'s' * several} {', '.join('+'.join(map(str, copy)) for copy in copies)}",
            note=" ".join(dict.fromkeys(report.devices[rank] for copy in copies for rank in copy)),
            lines=tuple(
                (one.node, " ".join([", ".join(one.walks), *(f"► {it}" for it in one.puts_out)]))
                for one in here
            ),
        )


def _arrows(report: Report) -> Iterator[Arrow]:
    """Yield each name once between two places, whatever the number of nodes and walks."""
    place_of = {rank: place for place, ranks in enumerate(report.places) for rank in ranks}
    seen: set[Arrow] = set()
    for link in report.links:
        for source in dict.fromkeys(place_of[rank] for rank in link.sources):
            for target in dict.fromkeys(place_of[rank] for rank in link.targets):
                arrow = Arrow(source, target, link.name, _SHAFTS[link.kind])
                if source != target and arrow not in seen:
                    seen.add(arrow)
                    yield arrow


def _streams(report: Report) -> Iterator[str]:
    """Yield a description of each stream, once."""
    producers_of: dict[str, list[str]] = {}
    for link in report.links:
        if link.kind == "stream":
            to = f"{link.target[1]} ({link.target[0]}), {link.chunks}"
            producers_of.setdefault(f"{link.name}|{to}", []).append(f"{link.source[1]} ({link.source[0]})")
    for key, producers in producers_of.items():
        name, _, to = key.partition("|")
        yield f"{name}, from {' and '.join(producers)} to {to}"


def _hanging(label: str, text: str) -> Iterator[str]:
    """Yield a labelled paragraph; a word longer than a line, such as a path, gets its own line."""
    indent = len(label) + 2
    for number, line in enumerate(sequence_diagram.wrapped(text, WIDTH - indent)):
        yield f"{'' if number else label + ':':<{indent}}{line}"


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


# ---- notes and warnings ------------------------------------------------------------------------------


def _tokenizer_fits(config: DeploymentConfig) -> bool:
    """True if the family accepts the checkpoint's tokenizer; False if it cannot be checked here.

    Raises:
        CheckpointError: it does not.
    """
    checkpoint = Path(config.checkpoint)
    if not (checkpoint / "tokenizer.json").is_file():  # a planning machine may have only config.json
        return False
    try:
        registry.load_processing(config.model, checkpoint, max_seq_len=config.max_seq_len)
    except ModuleNotFoundError:  # a machine used for planning only may have no libraries for it
        return False
    return True


def _model_fits(config: DeploymentConfig) -> bool:
    """True if workers accept the model, by their own loading code; False if it cannot be checked.

    Raises:
        CheckpointError, ConfigError: they do not.
    """
    try:
        from workers.loading import node_loading

        return node_loading.check_kv_nodes(config)
    except ModuleNotFoundError:  # a machine used for planning only may have no torch
        return False


def _network(config: DeploymentConfig) -> Iterator[str]:
    """Yield what the data plane lacks here; a model on one rank needs none."""
    if len(config.ranks) == 1:
        return
    plane, consequence = config.data_plane, f"{_ranks(tuple(config.ranks))} do not start here"
    if "nixl" in plane.transports and not _has_nixl():
        yield (
            "data_plane.transports names nixl, and NIXL is not installed (pip install 'dalsegno[rdma]'): "
            f"{consequence}"
        )
    if {"tcp", "nixl"} & {*plane.transports}:
        try:
            family, kind, _, _, where = socket.getaddrinfo(plane.address, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                probe.bind(where)
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not a valid host name"
            found = f"data_plane.address {plane.address!r} is not an address of this machine ({why})"
            yield f"{found}: {consequence}"


def _has_nixl() -> bool:
    try:
        from workers.data_plane.transports import nixl
    except ModuleNotFoundError:  # the workers' libraries are installed on their machine only
        return True
    return any(find_spec(name) is not None for name in nixl.PACKAGES)


def _devices(config: DeploymentConfig) -> tuple[dict[int, str], list[str]]:
    """Return each rank's device as its worker would choose it here, and the problems found."""
    try:
        from workers.machine.devices import choose_device
    except ModuleNotFoundError:  # a machine used for planning only may have no torch
        return {rank: config.device_of(rank) for rank in config.ranks}, []
    found: dict[int, str] = {}
    problems: list[str] = []
    for rank in config.ranks:
        try:
            found[rank] = str(choose_device(config, rank))
        except ConfigError as error:
            found[rank] = config.device_of(rank)
            problems.append(f"{error.message}: rank {rank} does not start here")
    return found, problems


def _attention(
    config: DeploymentConfig, node_placements: list[NodePlacement], devices: Mapping[int, str]
) -> Iterator[str]:
    """Yield CPU ranks that are configured with a GPU's attention backend: workers refuse that."""
    named = config.model_kwargs.get("attention", "auto")
    leaders = [rank for one in node_placements if one.engine is EngineKind.KV for rank in one.ranks]
    on_cpu = sorted({it for rank in leaders for it in config.tp_group_of(rank) if devices[it] == "cpu"})
    if named != "auto" and on_cpu:
        do = "does" if len(on_cpu) == 1 else "do"
        yield (
            f"model_kwargs.attention is {named!r}, which is for GPUs: "
            f"{_ranks(tuple(on_cpu))} {do} not start on a CPU"
        )


def _shared(devices: Mapping[int, str]) -> Iterator[str]:
    on: dict[str, list[int]] = {}
    for rank, device in devices.items():
        on.setdefault(device, []).append(rank)
    for device, ranks in on.items():
        if len(ranks) > 1 and device != "auto":
            what = "cores and memory" if device == "cpu" else "memory"
            yield f"{_ranks(tuple(ranks))} share {device}, its {what} too"


def _replicas(node_placements: list[NodePlacement]) -> Iterator[str]:
    for one in node_placements:
        if len(one.ranks) > 1:
            yield (
                f"{one.node} ({', '.join(one.walks)}) has {len(one.ranks)} replicas: "
                f"each request gets one of {_ranks(one.ranks)}"
            )


def _tp_groups(config: DeploymentConfig) -> Iterator[str]:
    """Yield the TP groups: ranks that share a node."""
    for group in config.groups:
        for leader, following in zip(group.ranks, group.followers, strict=False):
            nodes = (
                f"{', '.join(group.shared)} ({', '.join(group.walks)})" if group.walks else group.shared[0]
            )
            others = ", ".join(map(str, (leader, *following[:-1])))
            yield f"{nodes} is shared by ranks {others} and {following[-1]} (rank {leader} leads)"


def _kv_moves(config: DeploymentConfig, links: list[Link]) -> Iterator[str]:
    size = _kv_bytes(config)
    amount = f"{size / 1024:.0f} KiB" if size >= 1024 else f"{size} bytes"
    each = f", {amount} for each token so far" if size else ""
    for link in links:
        if link.kind == "kv" and link.leaves_its_rank:
            (walk, node), (to, _) = link.source, link.target
            way = f"from {_ranks(link.sources)} to {_ranks(link.targets)}"
            move = "move" if link.always_leaves else "may move"
            yield f"keys and values of {node} {move} {way} between {walk} and {to}{each}"


def _remarks(graph: ModelGraph, config: DeploymentConfig) -> Sequence[str]:
    """What the family says of the checkpoint."""
    if graph.remarks is None:
        return ()
    return graph.remarks(Path(config.checkpoint), config.model_kwargs)


def _room(graph: ModelGraph, config: DeploymentConfig) -> Iterator[str]:
    """Yield the room that requests take in the KV cache, where the family estimates it."""
    for room in graph.room(Path(config.checkpoint)) if graph.room is not None else ():
        each = room.numbers * _bytes_each(config, room.stored) if room.numbers else _kv_bytes(config)
        size = f", {room.tokens * each / 2**20:.1f} MiB" if each else ""
        limit = config.kv_tokens
        over = f", more than kv_tokens {limit}: it is refused" if limit and room.tokens > limit else ""
        yield f"{room.what} takes {room.tokens} tokens of the KV cache{size}{over}"


def _kv_bytes(config: DeploymentConfig) -> int:
    """The bytes of one token's keys and values, by the checkpoint; 0 if unknown."""
    if EngineKind.KV not in registry.graph(config.model).nodes.values():
        return 0
    model_config = read_language_config(Path(config.checkpoint))
    heads, layers = model_config.get("num_attention_heads"), _attending_layers(model_config)
    stored = str(model_config.get("dtype") or model_config.get("torch_dtype"))
    latent, rotated = (model_config.get(name) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    if isinstance(layers, int) and isinstance(latent, int) and isinstance(rotated, int):
        return layers * (latent + rotated) * _bytes_each(config, stored)
    if any(model_config.get(name) for name in ("v_head_dim", "global_head_dim", "per_layer_config")):
        return 0  # layers differ
    kv_heads, width, hidden = (
        model_config.get("num_key_value_heads", heads),
        model_config.get("head_dim"),
        model_config.get("hidden_size"),
    )
    if width is None and isinstance(hidden, int) and isinstance(heads, int) and heads:
        width = hidden // heads
    if not (isinstance(layers, int) and isinstance(kv_heads, int) and isinstance(width, int)):
        return 0
    if config.model_kwargs.get("kv_cache") == "int8":
        return 2 * layers * kv_heads * (width + _BYTES_OF_SCALE)
    return 2 * layers * kv_heads * width * _bytes_each(config, stored)


def _attending_layers(model_config: Mapping[str, Any]) -> int | None:
    """The number of layers with keys and values; None if the configuration does not say."""
    count, kinds = model_config.get("num_hidden_layers"), model_config.get("layer_types")
    if not isinstance(count, int):
        return None
    layers: int = count
    if isinstance(kinds, list):
        return sum(str(kind) != "linear_attention" and str(kind).endswith("attention") for kind in kinds)
    interval = model_config.get("full_attention_interval")
    if isinstance(interval, int) and interval > 0:
        return layers // interval
    # Hybrids that say in another way which of their layers attend.
    others = ("attn_layer_indices", "attn_layer_period", "hybrid_override_pattern", "linear_attn_config")
    return None if any(model_config.get(name) for name in others) else layers


def _bytes_each(config: DeploymentConfig, stored: str) -> int:
    """The bytes of a number in keys and values, for weights that are stored in a dtype."""
    dtype = str(config.model_kwargs.get("dtype", "auto"))
    return _BYTES.get(stored if dtype == "auto" else dtype, 2)


def _loops(graph: ModelGraph, config: DeploymentConfig) -> Iterator[str]:
    for walk, loop, ranks in layout.loops_over_ranks(graph, config.groups):
        yield (
            f"loop {loop} of walk {walk} runs over {_ranks(tuple(ranks))}: "
            "each of its iterations waits for the transport between them"
        )
