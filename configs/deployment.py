"""Deployment configuration: which model is served, where its nodes run, and how the processes do it.

The keys are those of M* (Stanford's any-to-any server, whose files load unchanged for a family we serve),
and a few of ours: docs/configuration.md, written from the structs below. Unknown keys, unknown nodes, a
node without a home: each is a clear error at start.

A configuration starts from a YAML file, a name in `configs/`, or a folder with a Hugging Face checkpoint
(`read`); `resolve` takes it as it is, `dalsegno.config.layers` lays environment and flags over it.
"""

import logging
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
import yaml
from msgspec import Meta

from configs import placement
from configs.placement import NodeGroup as NodeGroup  # noqa: PLC0414 - a part of a configuration
from configs.placement import PlacedGroup, PlacementError
from models import registry
from models.base import ModelGraph
from models.checkpoints import hub_cache as hub
from models.checkpoints.files import context_length, read_json
from shared.errors import ClientError
from shared.events import MAX_CHOICES, digest_of
from shared.ids import Rank
from shared.log.nats.credentials import Credentials
from shared.log.nats.durability import Keeping
from shared.log.port import Durability
from shared.telemetry.settings import TraceSettings
from shared.validation_errors import Misfit, described, misfit

_LOGGER: Final = logging.getLogger(__name__)
_NAMED_KEY: Final = re.compile(r"([A-Za-z0-9_.-]{1,64})=(?!=*$)(.+)", re.DOTALL)
"""`name=secret`. Signs of equality at the end alone are a secret's own: base64 is padded with them."""
_DEVICE: Final = re.compile(r"auto|cpu|cuda(:\d+)?")
_EVERYWHERE: Final = frozenset({"0.0.0.0", "::", "*", "0"})  # noqa: S104 - refused
_ON_A_HUB: Final = re.compile(r"[A-Za-z0-9][\w.-]*/([A-Za-z0-9][\w.-]*)")
_PADDED_CHARS: Final = 16
"""What is shorter and ends so is no padded secret, but a name whose secret was forgotten."""


Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=604_800)]
"""A time, up to a week: what is longer is no time limit, and what is infinite no number."""
SecondsOrNone: TypeAlias = Annotated[float, Meta(ge=0, le=604_800)]
"""The same, or 0."""


class ConfigError(ClientError):
    """A configuration that cannot be served; says file, key, value and what would be right."""

    code = "invalid_config"


class GatewaySettings(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """How a gateway meets the world.

    Attributes:
        host: the address it listens on; `0.0.0.0` is every one of this machine.
        port: the port it listens on; 0 is any free one.
        api_keys: who may ask, `name=secret` each or a secret alone; nobody needs a key while there are
            none. By environment or in a file of their own, not in a file that is shared.
        api_keys_file: the same, one per line, `#` before a comment; relative to the YAML file.
        cors_origins: web pages of these origins may ask; `*` is all, and none is the default.
        security_headers: whether answers carry them.
        requests_per_minute: per key, or per address where there are no keys; 0 is no limit.
        max_in_flight: answers being given at a time; more are told 429.
        max_connections: open at a time; more are told 503.
        max_body_bytes: of one request.
        max_tokens: the most a request may ask for.
        max_choices: the most answers one request may ask for, over all its prompts.
        max_messages: of one chat.
        max_embeddings: the most texts one request may ask embeddings of.
        request_timeout_s: after so long a request fails, and its client is told 504; 0 is never.
        header_timeout_s: for a client to send a request's head.
        body_timeout_s: for a client to send the next piece of its body.
        send_timeout_s: for a client to take the next piece of its answer.
        idle_timeout_s: for a connection between two requests.
        drain_s: how long answers may go on once the gateway is told to stop.
    """

    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    api_keys: list[str] = []
    api_keys_file: str | None = None
    cors_origins: list[str] = []
    security_headers: bool = True
    requests_per_minute: Annotated[int, Meta(ge=0)] = 0
    max_in_flight: Annotated[int, Meta(ge=1)] = 512
    max_connections: Annotated[int, Meta(ge=1)] = 4096
    max_body_bytes: Annotated[int, Meta(ge=1024)] = 32 * 1024 * 1024
    max_tokens: Annotated[int, Meta(ge=1)] = 1_000_000
    max_choices: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 128
    max_messages: Annotated[int, Meta(ge=1)] = 2048
    max_embeddings: Annotated[int, Meta(ge=1, le=2048)] = 2048
    request_timeout_s: SecondsOrNone = 600.0
    header_timeout_s: Seconds = 10.0
    body_timeout_s: Seconds = 30.0
    send_timeout_s: Seconds = 60.0
    idle_timeout_s: Seconds = 75.0
    drain_s: SecondsOrNone = 30.0


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What processes say to their operator.

    Attributes:
        level: what matters less is not said.
        format: `human`, one line each, or `json`, one object each.
        prompts: whether what clients wrote may appear in them.
        requests: whether each HTTP request is worth a line.
    """

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["human", "json"] = "human"
    prompts: bool = False
    requests: bool = True


class NatsSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The log's server.

    Attributes:
        url: `nats://host:port`, of a cluster several with commas between them; without one, `serve` starts a
            private server.
        prefix: the first token of all subjects, 1 to 64 small letters, digits, `_` or `-`; deployments that
            share a server differ in it.
        token: the server's; by environment, not in a file that is shared.
        token_file: a file that holds it, where there is no `token`: for secrets that are mounted. Relative
            to the YAML file.
        user: the name that `password` is of, where the server knows its users by password.
        password: that user's; by environment, not in a file that is shared.
        seed: of an nkey, for a server that knows its users by those; by environment, not in a file that is
            shared. It goes before `user`, and that before a token.
        credentials_file: a file that holds that seed, where there is no `seed`; or a folder that has one for
            each role, as `dalsegno init-security` makes it.
        ca_file: the certificates of the authorities that may vouch for the server. With it, nothing is said
            to a server that does not speak TLS.
        cert_file: a certificate of our own, where the server wants one.
        key_file: the private key of `cert_file`.
        durability: what an acked event survives, and the start refuses a server that does not give it:
            `process` the end of any process, `host` the end of the machine under the server
            (`sync_interval: always`), `cluster` the loss of one of three servers.
        monitors: where the servers tell how they are configured, `http://host:8222` each: `host` cannot be
            found out elsewhere. Not needed for a private server.
        max_bytes: the most the log may hold; nothing new is taken once a tenth of that is left. Without it,
            the bound is three quarters of the disk for a private server, and its own for any other.
        max_age_s: what is older leaves the log.
    """

    url: str | None = None
    prefix: Annotated[str, Meta(pattern=r"^[a-z0-9_-]{1,64}\Z")] = "ds"
    token: str | None = None
    token_file: str | None = None
    user: str | None = None
    password: str | None = None
    seed: str | None = None
    credentials_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    durability: Durability = "process"
    monitors: list[Annotated[str, Meta(pattern=r"^https?://[^\s@]+$")]] = []
    max_bytes: Annotated[int, Meta(ge=1 << 20)] | None = None
    max_age_s: Annotated[float, Meta(ge=60, le=10 * 365 * 24 * 3600)] = 7 * 24 * 3600.0


class RecoverySettings(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """When a process counts as dead, and how soon another has its place.

    Attributes:
        worker_silent_s: a worker that was not heard for so long is lost, and its requests go on elsewhere.
        worker_hung_s: so is one that has work and got no further for so long, though it is heard; 0 is
            never.
        leader_silent_s: a conductor that was not heard for so long leads no more.
        conductors: so many does `serve` run; one leads, the others follow the log and stand by.
        gateways: so many does `serve` run, on ports that follow on one another.
        snapshot_every: so many events does a conductor fold before it writes down what it knows, for a
            quick start; 0 is never.
    """

    worker_silent_s: Annotated[float, Meta(ge=0.6, le=600)] = 1.5
    worker_hung_s: SecondsOrNone = 60.0
    leader_silent_s: Annotated[float, Meta(ge=0.6, le=600)] = 1.5
    conductors: Annotated[int, Meta(ge=1, le=16)] = 1
    gateways: Annotated[int, Meta(ge=1, le=64)] = 1
    snapshot_every: Annotated[int, Meta(ge=0)] = 20_000


class DataPlaneSettings(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """How tensors go from worker to worker, beside the log.

    Attributes:
        arena_bytes: the most memory a worker takes for tensors that others read; taken as it is used.
        memory: what that is made of: `anonymous` ends with its process, whatever ends it; `named` lies in
            /dev/shm, for workers in containers that share that and do not see each other's processes.
        transports: the ways that may be taken, tried in this order: `local` in one process, `cuda_ipc`
            between the GPUs of a machine (not yet), `shm` on a machine, `nixl` over RDMA (with
            `dalsegno[rdma]`), `tcp`.
        address: where other workers reach this one over the network, and all it listens at: one address of
            this machine. What passes is not encrypted: outside the machine, take a network you trust.
        port: the one it listens at, for rank 0, and so many more for other ranks; 0 is any free one.
    """

    arena_bytes: Annotated[int, Meta(ge=1 << 20)] = 4 << 30
    memory: Literal["anonymous", "named"] = "anonymous"
    transports: Annotated[list[Literal["local", "cuda_ipc", "shm", "nixl", "tcp"]], Meta(min_length=1)] = (
        msgspec.field(default_factory=lambda: ["local", "shm", "tcp"])
    )
    address: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0


class SchedulingSettings(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Who is served when, and where.

    Attributes:
        replicas: of several ranks that a node group names, a request gets: `fsfs`, the one with the fewest
            open requests; `rr`, one after the other; `random`, one that its id says; `cache_aware`, the one
            that had the most of its beginning before, and of equals the one with the fewest.
        max_in_flight_per_replica: a rank that has so many gets no more; null is without limit.
        max_waiting: so many requests wait; more are told 429.
        shorten_above: while more than this share of `max_concurrent_requests` is taken, answers are
            admitted shorter than was asked for; null is never.
        shorten_to: the share of its `max_tokens` that a request gets then.
    """

    replicas: Literal["fsfs", "rr", "random", "cache_aware"] = "fsfs"
    max_in_flight_per_replica: Annotated[int, Meta(ge=1)] | None = None
    max_waiting: Annotated[int, Meta(ge=0)] = 4096
    shorten_above: Annotated[float, Meta(ge=0, le=1)] | None = None
    shorten_to: Annotated[float, Meta(ge=0.1, le=1)] = 0.8


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """Who may ask.

    Attributes:
        name: what logs and limits call its holder.
        secret: what the holder sends; of printable ASCII without spaces, as a header is.
    """

    name: str
    secret: str

    def __repr__(self) -> str:  # a traceback or a log line shall not give it away
        return f"ApiKey(name={self.name!r}, secret='***')"


class DeploymentConfig(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One model and its placement, and how the processes run.

    No decision on the log depends on `data_dir` and the sections behind it.

    Attributes:
        model: the family: `decoder_lm`, decoder-only language models (…ForCausalLM), or `orpheus`, which
            speaks.
        checkpoint: a folder in Hugging Face format, with safetensors; relative to the YAML file. When absent,
            that of the family's usual repository, where the hub's tools have downloaded it to.
        max_seq_len: tokens of one sequence, prompt and answer together.
        node_groups: where nodes run, see below.
        name: what clients call the model; the YAML file's name when absent.
        model_kwargs: settings of the engine and of the family (`snac` of `orpheus`), fixed at start, see
            below.
        kv_tokens: the size of a rank's KV pool in tokens; found from the memory there is when absent.
        default_max_tokens: for requests that do not limit their answer, as far as the context allows.
        max_concurrent_requests: so many are admitted at a time; the others wait, in order.
        max_attempts: how often in a row a request is tried that comes no further, because workers die under
            it, before it fails.
        walk_timeouts_s: by walk, how long it may take, `{decode: 60}`; its request fails after that. A step
            of several walks may take what they may together, where each of them has a limit.
        scheduling: who is served when, and where, see below.
        data_dir: where `serve` keeps its log, and a conductor what it notes for a quick start;
            `.dalsegno/MODEL` in the current folder when absent. Relative to the YAML file.
        devices: what a rank computes on, `{0: cuda:0, 1: cpu}`; `auto`, as for a rank that is not in it, is
            a GPU of its own as far as there are any, else the CPU.
        data_plane: how tensors go from worker to worker, see below.
        gateway: how a gateway meets the world, see below.
        logs: what processes say to their operator, see below.
        traces: OpenTelemetry, see below.
        nats: the log's server, see below.
        recovery: when a process counts as dead, see below.
    """

    model: str
    checkpoint: str = ""
    max_seq_len: Annotated[int, Meta(ge=2)]
    node_groups: Annotated[list[NodeGroup], Meta(min_length=1)]
    name: str = ""
    model_kwargs: dict[str, Any] = {}
    kv_tokens: Annotated[int, Meta(ge=16)] | None = None
    default_max_tokens: Annotated[int, Meta(ge=1)] = 2048
    max_concurrent_requests: Annotated[int, Meta(ge=1)] = 256
    max_attempts: Annotated[int, Meta(ge=1)] = 2
    walk_timeouts_s: dict[str, Seconds] = {}
    scheduling: SchedulingSettings = SchedulingSettings()
    data_dir: str | None = None
    devices: dict[int, str] = {}
    data_plane: DataPlaneSettings = DataPlaneSettings()
    gateway: GatewaySettings = GatewaySettings()
    logs: LogSettings = LogSettings()
    traces: TraceSettings = TraceSettings()
    nats: NatsSettings = NatsSettings()
    recovery: RecoverySettings = RecoverySettings()

    @property
    def groups(self) -> tuple[PlacedGroup, ...]:
        """Where nodes run: each in each walk has one group.

        Raises:
            PlacementError: there is no such placement; `check` has told before.
        """
        return placement.resolve(self.node_groups, registry.graph(self.model))

    @property
    def ranks(self) -> list[Rank]:
        """Every rank, in order."""
        return placement.ranks_of(self.groups)

    @property
    def leaders(self) -> list[Rank]:
        """Those of them that get orders; the others follow one of these."""
        return placement.leaders_of(self.groups)

    def copy_of(self, rank: int) -> tuple[Rank, ...]:
        """Who shares a copy of a node with `rank`, the leader first; `rank` alone where nobody does."""
        return placement.copy_of(self.groups, rank)

    @property
    def digest(self) -> str:
        """Of what decisions depend on: the same whatever the processes' own settings are."""
        return digest_of(self.decisive)

    @property
    def decisive(self) -> "DeploymentConfig":
        """What decisions depend on; the processes' own settings, and so all secrets, are the defaults."""
        return msgspec.structs.replace(
            self,
            data_dir=None,
            devices={},
            data_plane=DataPlaneSettings(),
            gateway=GatewaySettings(),
            logs=LogSettings(),
            traces=TraceSettings(),
            nats=NatsSettings(),
            recovery=RecoverySettings(),
        )

    @property
    def placement(self) -> dict[str, int]:
        """Each node's rank, of several the first."""
        groups = self.groups
        return placement.assign(groups, [group.ranks[0] for group in groups])[0]

    def nodes_of(self, rank: int) -> list[str]:
        """The nodes a rank hosts."""
        return placement.nodes_on(self.groups, rank)

    def device_of(self, rank: int) -> str:
        """What is said of a rank's device: `auto`, `cpu`, `cuda` or `cuda:N`."""
        return self.devices.get(rank) or str(self.model_kwargs.get("device", "auto"))


SECTIONS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "scheduling": SchedulingSettings,
    "data_plane": DataPlaneSettings,
    "gateway": GatewaySettings,
    "logs": LogSettings,
    "traces": TraceSettings,
    "nats": NatsSettings,
    "recovery": RecoverySettings,
}
_NATS_FILES: Final = ("token_file", "credentials_file", "ca_file", "cert_file", "key_file")
PATHS: Final = frozenset(
    {"checkpoint", "data_dir", "gateway.api_keys_file", *(f"nats.{name}" for name in _NATS_FILES)}
)
"""Relative to the file they are in; in the environment and on the command line, to the current folder."""
_ENGINE_PATHS: Final = ("draft",)
"""The same, of the engine's settings in `model_kwargs`."""
SECRETS: Final = frozenset({"gateway.api_keys", "nats.password", "nats.seed", "nats.token"})
"""Never printed, never an argument of a process."""
MASK: Final = "***"
"""What is printed in the place of a secret."""


def paths(family: object) -> frozenset[str]:
    """The keys that are paths: `PATHS`, and those in `model_kwargs` that the engine or a family names."""
    own = registry.graph(family).paths if isinstance(family, str) and family in registry.families() else ()
    return PATHS | {f"model_kwargs.{name}" for name in (*own, *_ENGINE_PATHS)}


def configs_folder() -> Path:
    """Where the named configurations are, also in an installed wheel."""
    return Path(str(files("configs")))


def named() -> list[str]:
    """The names `resolve` knows."""
    return sorted(path.stem for path in configs_folder().glob("*.yaml"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What a configuration starts from, not checked yet.

    Attributes:
        values: keys and values as they are written.
        source: the file's path, for messages.
        folder: what relative paths in `values` are relative to.
        name: the model's, unless `values` has one.
    """

    values: dict[str, Any]
    source: str
    folder: Path
    name: str


def resolve(model: str, hub_cache: Path | None = None) -> DeploymentConfig:
    """The configuration behind a name in `configs/`, a YAML file, or a checkpoint folder, as it is there.

    `hub_cache` is where the hub's tools put their downloads, for a file that names no checkpoint.

    Raises:
        ConfigError: it is none of them, or cannot be served.
    """
    base = read(model)
    return check(base.values, source=base.source, folder=base.folder, name=base.name, hub_cache=hub_cache)


def read(model: str) -> Base:
    """What is written behind a name in `configs/`, a YAML file, or a checkpoint folder.

    Raises:
        ConfigError: it is none of them, or cannot be read.
    """
    if model in named():  # before a folder that happens to be called so; that one is `./name`
        return _of_file(configs_folder() / f"{model}.yaml")
    path = Path(model)
    if path.is_dir():
        return _of_folder(path)
    if path.suffix in {".yaml", ".yml"}:
        return _of_file(path)
    near = get_close_matches(model, named(), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    if hub := _ON_A_HUB.fullmatch(model):
        get = f"`hf download {model} --local-dir {hub[1]}`"
        hint = f"; nothing is downloaded by itself: {get}, then serve ./{hub[1]}"
    raise ConfigError(
        f"{model!r} is no model to serve: expected one of {named()}, a YAML file, "
        f"or a folder with a Hugging Face checkpoint{hint}"
    )


def is_text(text: str) -> bool:
    """Whether `text` can be written: a lone surrogate, which YAML can escape, cannot."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def is_integer_of_64_bits(value: int) -> bool:
    """Whether `value` can be written: what is larger has no place in an event."""
    return -(2**63) <= value < 2**63


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, where YAML's own takes the last; and what cannot be written."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem="a key is there twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if not is_text(str(value)):
            raise yaml.MarkedYAMLError(problem="half a character", problem_mark=node.start_mark)
        return value

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value: int = super().construct_yaml_int(node)
        if not is_integer_of_64_bits(value):
            raise yaml.MarkedYAMLError(problem="an integer beyond 64 bits", problem_mark=node.start_mark)
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def parse_yaml(text: str, source: str) -> Any:
    """What `text` says in YAML.

    Raises:
        ConfigError: it is no YAML; says where, in one line, and repeats nothing of it: there may be secrets.
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - it is the safe one
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{source} is no YAML: {error.problem or 'malformed'}{where}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a year 0 in a date, a thousand brackets
        raise ConfigError(f"{source} is no YAML: {type(error).__name__}") from error


def _of_file(path: Path) -> Base:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(f"cannot read the configuration {path}: {why}") from error
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected keys and values, found {described(values)}")
    return Base(values=values, source=str(path), folder=path.parent, name=path.stem)


def _of_folder(folder: Path) -> Base:
    folder = folder.resolve()
    family = registry.family_of(folder)
    said = read_json(folder / "config.json")
    length = context_length(said)
    if length is None:
        raise ConfigError(
            f"{folder}/config.json: expected an integer max_position_embeddings, "
            f"found {said.get('max_position_embeddings')!r}; "
            "write a YAML file with max_seq_len instead"
        )
    values: dict[str, Any] = {
        "model": family,
        "checkpoint": str(folder),
        "max_seq_len": length,
        "node_groups": [{"node_names": list(registry.graph(family).nodes), "ranks": [0]}],
    }
    return Base(values=values, source=str(folder), folder=folder, name=folder.name)


def check(
    raw: Mapping[str, Any],
    *,
    source: str,
    folder: Path,
    name: str,
    sources: Mapping[str, str] | None = None,
    hub_cache: Path | None = None,
) -> DeploymentConfig:
    """The configuration in `raw`, with its paths made absolute and its placement checked.

    Args:
        raw: keys and values.
        source: where they are from, for messages.
        folder: what its relative paths are relative to.
        name: the model's, unless `raw` has one.
        sources: where single keys (`gateway.port`) are from, if not from `source`.
        hub_cache: where the hub's tools put their downloads; asked where no checkpoint is named.

    Raises:
        ConfigError: it cannot be served; says source, key, value, and what would be right.
        UnknownFamilyError: nobody serves such a model; told first, for such a file has keys of its own.
    """
    whence = _Whence(source, sources or {})
    raw = {key: value for key, value in raw.items() if value is not None or key not in SECTIONS}
    graph = _graph(raw.get("model"), whence)
    _refuse_unknown_in(raw, whence)
    _check_devices(raw.get("devices"), whence)
    try:
        config = msgspec.convert(raw, DeploymentConfig, str_keys=True)  # a rank in `devices` may be "0"
    except msgspec.ValidationError as error:
        found = misfit(error, raw, DeploymentConfig)
        raise ConfigError(f"{whence.of(found.place)}: {discreet(found)}") from error
    assert graph is not None  # a `model` that is no string does not convert
    config = _with_paths(_with_checkpoint(config, graph, hub_cache, whence), graph, folder, whence)
    config = msgspec.structs.replace(config, name=config.name or name)
    if not _is_file(Path(config.checkpoint) / "config.json"):
        what = "has no config.json" if os.path.lexists(config.checkpoint) else "does not exist"
        raise ConfigError(f"{whence.of('checkpoint')}: checkpoint {config.checkpoint} {what}")
    for key, secret in (
        ("gateway.api_keys", config.gateway.api_keys),
        ("nats.password", [config.nats.password]),
        ("nats.seed", [config.nats.seed]),
        ("nats.token", [config.nats.token]),
    ):
        if any(one is not None and split_key(one)[1] == MASK for one in secret):
            raise ConfigError(
                f"{whence.of(key)}: {key}: {MASK} stands for a secret that was not printed; "
                "say it by environment, or in a file of its own"
            )
    _check_placement(config, graph, whence)
    if unknown := sorted(config.walk_timeouts_s.keys() - graph.walks.keys()):
        meant = get_close_matches(unknown[0], graph.walks, n=1)
        raise ConfigError(
            f"{whence.of('walk_timeouts_s')}: walk_timeouts_s: expected walks of {config.model} "
            f"({', '.join(sorted(graph.walks))}), found {unknown[0][:80]!r}"
            + (f"; did you mean {meant[0]!r}?" if meant else "")
        )
    if config.nats.durability == "cluster" and config.nats.url is None:
        raise ConfigError(
            f"{whence.of('nats.durability')}: nats.durability: cluster needs a NATS cluster, and a private "
            "server is one: name the cluster's servers with --nats or nats.url, or ask for host or process"
        )
    if config.data_plane.address in _EVERYWHERE:
        raise ConfigError(
            f"{whence.of('data_plane.address')}: data_plane.address: expected one address of this machine, "
            f"the one that other workers reach; found {config.data_plane.address!r}, which is all of them"
        )
    return config


def _graph(family: object, whence: "_Whence") -> ModelGraph | None:
    if not isinstance(family, str):
        return None
    try:
        return registry.graph(family)
    except registry.UnknownFamilyError as error:
        raise registry.UnknownFamilyError(f"{whence.of('model')}: {error.message}") from error


def _with_checkpoint(
    config: DeploymentConfig, graph: ModelGraph, hub_cache: Path | None, whence: "_Whence"
) -> DeploymentConfig:
    """The configuration with a checkpoint: the one it names, else the downloaded one."""
    if config.checkpoint:
        return config
    told = "name a folder in the key checkpoint, or with --checkpoint"
    if not graph.repository:
        raise ConfigError(f"{whence.of('checkpoint')}: checkpoint: expected a folder, found nothing; {told}")
    found = hub.snapshot(hub_cache, graph.repository) if hub_cache is not None else None
    if found is None:
        where = f" in {hub_cache}" if hub_cache is not None else ""
        raise ConfigError(
            f"{whence.of('checkpoint')}: no checkpoint is named, and {graph.repository} was not downloaded: "
            f"not found{where}; get it with `hf download {graph.repository}`, or {told}"
        )
    return msgspec.structs.replace(config, checkpoint=str(found))


def discreet(found: Misfit) -> str:
    """What does not fit, without the value where that is a secret."""
    key = found.place.partition("[")[0]
    if key not in SECRETS:
        return found.message
    return f"{found.place}: {found.problem.partition(', found')[0]}, found a value of another kind"


def refuse_unknown(found: Mapping[str, Any], known_by: type[msgspec.Struct], where: str) -> None:
    """Refuse a key that the struct does not have; msgspec would not say which one is near.

    Raises:
        ConfigError: names the key, and the nearest that is known.
    """
    known = {field.name: field.name for field in msgspec.structs.fields(known_by)}
    for key in found:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key}; {neighbour(str(key), known)}")


def neighbour(word: str, known: Mapping[str, str], listed: Iterable[str] | None = None) -> str:
    """What may be meant by `word`: the nearest that is known, as it is to be written, or what there is."""
    near = get_close_matches(word, known, n=1)
    return (
        f"did you mean {known[near[0]]!r}?" if near else f"expected one of {list(listed or known.values())}"
    )


@dataclass(frozen=True, slots=True)
class _Whence:
    """Where a value is from: a file, unless an environment variable or a flag said it."""

    file: str
    others: Mapping[str, str]

    def of(self, place: str) -> str:
        key = place.partition("[")[0]
        while key and key not in self.others:
            key = key.rpartition(".")[0]
        return self.others.get(key, self.file)


def _refuse_unknown_in(raw: Mapping[str, Any], whence: _Whence) -> None:
    top = {field.name: field.name for field in msgspec.structs.fields(DeploymentConfig)}
    inner = {
        field.name: f"{section}.{field.name}"
        for section, kind in SECTIONS.items()
        for field in msgspec.structs.fields(kind)
    }
    for key in raw:
        if key not in top:
            raise ConfigError(
                f"{whence.file}: unknown key {key}; {neighbour(str(key), inner | top, listed=top)}"
            )
    for section, kind in SECTIONS.items():
        if isinstance(values := raw.get(section), dict):
            refuse_unknown(values, kind, f"{whence.file}: {section}")
    groups = raw.get("node_groups")
    for number, group in enumerate(groups if isinstance(groups, list) else ()):
        if isinstance(group, dict):
            refuse_unknown(group, NodeGroup, f"{whence.of('node_groups')}: node_groups[{number}]")


def _with_paths(
    config: DeploymentConfig, graph: ModelGraph, folder: Path, whence: _Whence
) -> DeploymentConfig:
    """The configuration with its paths made absolute (`paths`)."""

    def absolute(key: str, path: str) -> str:
        try:
            return str((folder / Path(path).expanduser()).resolve())
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, no home, a null byte
            raise ConfigError(f"{whence.of(key)}: {key}: {path!r} is no path: {error}") from error

    def absolute_if_told(key: str, path: str | None) -> str | None:
        return absolute(key, path) if path is not None else None

    keys_file = absolute_if_told("gateway.api_keys_file", config.gateway.api_keys_file)
    nats_files = {name: absolute_if_told(f"nats.{name}", getattr(config.nats, name)) for name in _NATS_FILES}
    own = {
        name: absolute(f"model_kwargs.{name}", value)
        for name, value in config.model_kwargs.items()
        if name in (*graph.paths, *_ENGINE_PATHS) and isinstance(value, str)
    }
    return msgspec.structs.replace(
        config,
        model_kwargs=config.model_kwargs | own,
        checkpoint=absolute("checkpoint", config.checkpoint),
        data_dir=absolute_if_told("data_dir", config.data_dir),
        gateway=msgspec.structs.replace(config.gateway, api_keys_file=keys_file),
        nats=msgspec.structs.replace(config.nats, **nats_files),
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, a folder that is not ours to look into
        return False


def _check_devices(devices: object, whence: "_Whence") -> None:
    """Say of what is wrong in the map which rank it is."""
    for rank, device in devices.items() if isinstance(devices, dict) else ():
        where = f"{whence.of(f'devices.{rank}')}: devices.{rank}"
        if not str(rank).isdecimal():
            raise ConfigError(f"{where}: expected a rank, an integer >= 0, found {described(rank)}")
        if not isinstance(device, str) or not _DEVICE.fullmatch(device):
            raise ConfigError(f"{where}: expected auto, cpu, cuda or cuda:N, found {described(device)}")


def _check_placement(config: DeploymentConfig, graph: ModelGraph, whence: "_Whence") -> None:
    try:
        ranks = placement.ranks_of(placement.resolve(config.node_groups, graph))
    except PlacementError as error:
        raise ConfigError(f"{whence.of('node_groups')}: {error}") from error
    if strangers := sorted(set(config.devices) - set(ranks)):
        raise ConfigError(
            f"{whence.of('devices')}: devices: expected ranks of node_groups, which are {ranks}, "
            f"found {strangers}"
        )
    if len(ranks) > 1 and set(config.data_plane.transports) == {"local"}:
        raise ConfigError(
            f"{whence.of('data_plane.transports')}: data_plane.transports: expected a way from process to "
            f"process, as shm or tcp, for the ranks {ranks}; found local alone"
        )


def api_keys(settings: GatewaySettings) -> tuple[ApiKey, ...]:
    """Every key a gateway takes: those of the configuration, then those of its file.

    A key without a name is called `key-<its place>`. A file that others can read is worth a warning.

    Raises:
        ConfigError: the file cannot be read, or a key cannot be sent, or one is there twice. No message
            holds a secret.
    """
    told = [(f"gateway.api_keys[{place}]", text) for place, text in enumerate(settings.api_keys)]
    if settings.api_keys_file is not None:
        told += _lines(Path(settings.api_keys_file))
    return _keys(told)


def split_key(text: str) -> tuple[str, str]:
    """The name, empty where there is none, and the secret in `name=secret`."""
    told = _NAMED_KEY.fullmatch(text)
    return (told[1], told[2]) if told else ("", text)


def log_keeping(settings: NatsSettings, *, syncs_always: bool = False) -> Keeping:
    """How the log is to be kept; `syncs_always`: by a server of ours, that was told to sync."""
    return Keeping(
        durability=settings.durability,
        monitors=settings.monitors,
        syncs_always=syncs_always,
        max_bytes=settings.max_bytes,
        max_age_s=settings.max_age_s,
    )


def nats_credentials(settings: NatsSettings, role: str) -> Credentials:
    """What `role` shows to the NATS server, told or in files.

    Args:
        settings: as they are told.
        role: whose seed it is, where there is a folder of them: `gateway`, `worker-0`, ...

    Raises:
        ConfigError: a file cannot be read, or does not hold what it should.
        CredentialsError: what is told cannot be used.
    """
    told: dict[str, str | None] = {}
    if settings.seed:
        told["seed"] = settings.seed
    elif settings.credentials_file is not None:
        told["seed"] = _nats_seed(Path(settings.credentials_file), role)
    elif settings.user or settings.password:
        told |= {"user": settings.user or None, "password": settings.password or None}
    else:
        told["token"] = _nats_token(settings)
    return Credentials(
        **told, ca_file=settings.ca_file, cert_file=settings.cert_file, key_file=settings.key_file
    )


def _nats_token(settings: NatsSettings) -> str | None:
    if settings.token or settings.token_file is None:
        return settings.token or None
    return _secret_in(Path(settings.token_file), "nats.token_file", "the token of the NATS server")


def _nats_seed(path: Path, role: str) -> str:
    if path.is_dir():
        path = path / f"{role}.nk"
    return _secret_in(path, "nats.credentials_file", "an nkey's seed")


def _secret_in(path: Path, key: str, what: str) -> str:
    secret = _text_of(path, key).strip()
    if not secret:
        raise ConfigError(f"{key}: {path} is empty; expected {what}")
    return secret


def _lines(path: Path) -> Iterable[tuple[str, str]]:
    """The file's lines that hold something, and where each is."""
    text = _text_of(path, "gateway.api_keys_file")
    if path.stat().st_mode & stat.S_IROTH:
        _LOGGER.warning("%s holds keys, and everybody on this machine can read it: chmod o-r", path)
    lines = [(f"{path}, line {number}", line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    told = [(where, line) for where, line in lines if line and not line.startswith("#")]
    if not told:  # without a key everybody may ask: nobody who names a file means that
        raise ConfigError(f"gateway.api_keys_file: {path} holds no key; expected one per line")
    return told


def _text_of(path: Path, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # editors on Windows put a mark before the first line
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(f"{key}: cannot read {path}: {why}") from error


def _keys(told: Iterable[tuple[str, str]]) -> tuple[ApiKey, ...]:
    found: dict[str, ApiKey] = {}
    secrets: dict[str, str] = {}
    for place, (where, text) in enumerate(told, 1):
        name, secret = split_key(text)
        if not name and text.endswith("=") and len(text) < _PADDED_CHARS:
            raise ConfigError(f"{where}: expected a secret behind the sign of equality, found nothing")
        if not secret or not all("!" <= char <= "~" for char in secret):
            raise ConfigError(
                f"{where}: expected `name=secret` or a secret, of printable ASCII without spaces; "
                "found what no client could send"
            )
        name = name or f"key-{place}"
        if name in found:
            raise ConfigError(f"{where}: the name {name!r} is given to another key already")
        if secret in secrets:
            raise ConfigError(f"{where}: the key {name!r} has the secret of {secrets[secret]!r}")
        found[name] = ApiKey(name=name, secret=secret)
        secrets[secret] = name
    return tuple(found.values())
