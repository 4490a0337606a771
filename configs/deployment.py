"""The schema of a deployment: which model is served, where its nodes run, how the processes behave.

The keys are those of M* (Stanford's any-to-any server; its files load unchanged for families that are served
here) and some of our own. docs/configuration.md is generated from the docstrings below.

Related modules: `files` reads a source of configuration, `checks` validates it, `dalsegno.config.layers` puts
environment variables and flags on top.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from configs import placement
from configs.placement import NodeGroup as NodeGroup  # noqa: PLC0414 - a part of a configuration
from configs.placement import PlacedGroup
from models import registry
from shared.errors import ClientError
from shared.events import MAX_CHOICES, MAX_TEXTS, digest_of
from shared.ids import Rank
from shared.log.port import Durability
from shared.telemetry.settings import TraceSettings

Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=604_800)]
"""Seconds, above 0 and at most a week."""
SecondsOrNone: TypeAlias = Annotated[float, Meta(ge=0, le=604_800)]
"""Seconds, from 0 to a week; 0 usually means no limit."""


_HOST_PATTERN: Final = r"^(\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?\Z"


class ConfigError(ClientError):
    """A configuration that cannot be served. The message names file, key, value and what was expected."""

    code = "invalid_config"


class GatewaySettings(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The HTTP server.

    Attributes:
        host: the address to listen on; `0.0.0.0` listens on all addresses of this machine.
        port: the port to listen on; 0 chooses a free one.
        api_keys: accepted API keys, each `name=secret` or a secret alone. Without any, no key is required.
            Give them by environment variable or in `api_keys_file`, not in a shared file.
        api_keys_file: a file of API keys, one per line, comments after `#`; relative to the YAML file.
        cors_origins: origins of web pages that may send requests, such as `https://app.example`; `*` allows
            all. By default only pages of this gateway's own address may.
        allowed_hosts: names and addresses in the `Host` of requests, in addition to this machine's loopback
            names, and without ports; `*.example` allows all names below `example`, `*` all. Without any, a
            gateway that listens on loopback answers to loopback names alone, others to every name.
        model_aliases: further names by which clients may ask for the model, such as those that a program has
            built in. The log has the model's own name.
        security_headers: add security headers to responses.
        requests_per_minute: rate limit per API key, or per client address without keys; 0 is no limit.
        max_in_flight: concurrent requests; further ones get status 429.
        max_connections: open connections; further ones get status 503.
        max_body_bytes: size of one request body.
        max_tokens: the largest `max_tokens` that a request may ask for.
        max_choices: the most answers per request, over all its prompts.
        max_messages: messages of one chat.
        max_embeddings: inputs of one embeddings request.
        max_documents: documents of one request to rerank, or pairs of one to score.
        request_timeout_s: time limit of a request, after which it fails with status 504; 0 is no limit.
        header_timeout_s: time for a client to send the request head.
        body_timeout_s: time for a client to send the next part of the body.
        send_timeout_s: time for a client to accept the next part of the response.
        idle_timeout_s: time that a connection may be idle between two requests.
        page: serve a page for people at `/`: chat, files, sound, and a request's way through the system.
        batch_lines: lines of batches (`/v1/batches`) that this gateway runs at a time; one for several
            answers counts as several.
        drain_s: time that running responses get to finish when the gateway is stopped.
    """

    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    api_keys: list[str] = []
    api_keys_file: str | None = None
    cors_origins: list[str] = []
    allowed_hosts: list[str] = []
    model_aliases: list[Annotated[str, Meta(min_length=1, max_length=256)]] = []
    security_headers: bool = True
    requests_per_minute: Annotated[int, Meta(ge=0)] = 0
    max_in_flight: Annotated[int, Meta(ge=1)] = 512
    max_connections: Annotated[int, Meta(ge=1)] = 4096
    max_body_bytes: Annotated[int, Meta(ge=1024)] = 32 * 1024 * 1024
    max_tokens: Annotated[int, Meta(ge=1)] = 1_000_000
    max_choices: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 128
    max_messages: Annotated[int, Meta(ge=1)] = 2048
    max_embeddings: Annotated[int, Meta(ge=1, le=2048)] = 2048
    max_documents: Annotated[int, Meta(ge=1, le=MAX_TEXTS)] = 2048
    request_timeout_s: SecondsOrNone = 600.0
    header_timeout_s: Seconds = 10.0
    body_timeout_s: Seconds = 30.0
    send_timeout_s: Seconds = 60.0
    idle_timeout_s: Seconds = 75.0
    page: bool = True
    batch_lines: Annotated[int, Meta(ge=1, le=1024)] = 32
    drain_s: SecondsOrNone = 30.0


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Log lines of the processes. The event log is configured under `nats`.

    Attributes:
        level: the least severe level that is logged.
        format: `human` writes text lines, `json` writes one JSON object per line.
        prompts: allow log lines to quote what clients wrote.
        requests: write an access log line per HTTP request.
    """

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["human", "json"] = "human"
    prompts: bool = False
    requests: bool = True


class NatsSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The NATS server that keeps the event log.

    Attributes:
        url: `nats://host:port`; several addresses of a cluster, separated by commas. Without it, `serve`
            starts a private server.
        prefix: the first token of all subjects: 1 to 64 lower-case letters, digits, `_` or `-`. Deployments
            that share a server need different prefixes.
        token: the server's token. Give it by environment variable, not in a shared file.
        token_file: a file that contains the token, used if `token` is not set (for mounted secrets); relative
            to the YAML file.
        user: the user name that belongs to `password`.
        password: the user's password. Give it by environment variable, not in a shared file.
        seed: the seed of an nkey. Give it by environment variable, not in a shared file. It has precedence
            over `user`, and `user` over `token`.
        credentials_file: a file that contains the seed, used if `seed` is not set; or a folder with one such
            file per role, as written by `dalsegno init-security`.
        ca_file: certificates of the authorities that are trusted. If set, TLS is required.
        cert_file: a client certificate, if the server requires one.
        key_file: the private key of `cert_file`.
        durability: the failure that acknowledged events must survive: `process` the end of any process,
            `host` the failure of the server's machine (`sync_interval: always`), `cluster` the loss of one of
            three servers. The start fails if the server does not provide it.
        monitors: monitoring addresses of the servers, `http://host:8222` each; `host` can only be verified
            there. Not needed for a private server.
        max_bytes: size limit of the log. New requests are refused when less than a tenth of it is free.
            Default: three quarters of the disk for a private server, the server's own limit otherwise.
        max_age_s: events older than this leave the log.
        max_consumers: the most readers (JetStream consumers) that the server keeps for the log, of all keys
            together.
        max_consumers_per_key: the most readers of one NATS key or user. The conductor ends further ones, the
            newest first.
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
    max_consumers: Annotated[int, Meta(ge=64, le=1_000_000)] = 2048
    max_consumers_per_key: Annotated[int, Meta(ge=16, le=1_000_000)] = 128


class RecoverySettings(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Failure detection, and redundant processes.

    Attributes:
        worker_silent_s: a worker without a heartbeat for this long counts as lost; its requests continue on
            another incarnation or rank.
        worker_hung_s: a worker that has work, sends heartbeats and makes no progress for this long counts as
            lost too; 0 disables the check.
        leader_silent_s: a conductor without a heartbeat for this long loses the leadership.
        conductors: conductors that `serve` starts; one leads, the others are standbys that follow the log.
        gateways: gateways that `serve` starts, on consecutive ports.
        snapshot_every: events that a conductor folds between two snapshots, which shorten its next start;
            0 writes none.
        templates: `serve` forks its processes from ones that have imported their code, so that a killed
            worker is back sooner; false starts each as a new program. Linux only.
    """

    worker_silent_s: Annotated[float, Meta(ge=0.6, le=600)] = 1.5
    worker_hung_s: SecondsOrNone = 60.0
    leader_silent_s: Annotated[float, Meta(ge=0.6, le=600)] = 1.5
    conductors: Annotated[int, Meta(ge=1, le=16)] = 1
    gateways: Annotated[int, Meta(ge=1, le=64)] = 1
    snapshot_every: Annotated[int, Meta(ge=0)] = 20_000
    templates: bool = True


class SealingSettings(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Seals: signatures of the log, so that later changes of it are detected.

    Attributes:
        enabled: seal the log.
        key_file: the file of the signing key, made by `dalsegno init-security` or, if it does not exist, at
            the first start. It must not be in the data dir. Default: `dalsegno/seal.key` under
            `$XDG_STATE_HOME`, or `~/.local/state`.
        key: the key itself. Give it by environment variable, not in a shared file.
        trusted_keys: public keys, in addition to that of the signing key, whose seals are trusted: of other
            conductors, and of earlier keys.
        interval_s: the time between seals while there are new events; requests are also sealed when they end.
        anchor_dir: the folder of the files that record each seal. It must not be in the data dir. Default:
            `anchors` beside the key file.
        anchors: further places that record each seal: `nats://user:password@host:4222/subject` for a subject
            of a stream on another server, or an `http(s)://` address that accepts a POST.
    """

    enabled: bool = True
    key_file: str | None = None
    key: str | None = None
    trusted_keys: list[Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]] = []
    interval_s: Annotated[float, Meta(ge=0.2, le=3600)] = 5.0
    anchor_dir: str | None = None
    anchors: list[Annotated[str, Meta(pattern=r"^(nats|tls|https?)://[^/\s]+/\S*$")]] = []


class DataPlaneSettings(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Transfer of tensors between workers.

    Attributes:
        arena_bytes: the most memory that a worker uses for tensors that others read; allocated on use.
        memory: the kind of shared memory: `anonymous` is freed when its process ends, `named` lies in
            /dev/shm, for workers in containers that share /dev/shm but not their process namespace.
        transports: transports that may be used, always tried in this order, not in that of the list: `local`
            within one process, `cuda_ipc` between GPUs of one machine (used with `shm`, too), `shm` on one
            machine, `nixl` over RDMA (with `dalsegno[rdma]`), `tcp`.
        address: the address of this machine on which other workers reach this one. The traffic is not
            encrypted: use a trusted network.
        port: the port of rank 0; rank n uses `port + n`. 0 chooses free ports.
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
    """Admission and the choice of replicas.

    Attributes:
        replicas: the choice between several ranks of a node group: `fsfs` (the name is mini-sglang's), the
            rank with the fewest open requests; `rr`, round robin; `random`, derived from the request id;
            `cache_aware`, the rank with the longest cached prefix of the prompt, then the fewest open
            requests.
        max_in_flight_per_replica: requests per rank; null is no limit.
        max_waiting: requests that may wait for admission; further ones get status 429.
        shorten_above: share of `max_concurrent_requests` in use above which answers are admitted with fewer
            tokens than requested; null never shortens.
        shorten_to: share of the requested `max_tokens` that is admitted then.
    """

    replicas: Literal["fsfs", "rr", "random", "cache_aware"] = "fsfs"
    max_in_flight_per_replica: Annotated[int, Meta(ge=1)] | None = None
    max_waiting: Annotated[int, Meta(ge=0)] = 4096
    shorten_above: Annotated[float, Meta(ge=0, le=1)] | None = None
    shorten_to: Annotated[float, Meta(ge=0.1, le=1)] = 0.8


DEFAULT_SCHEDULING: Final = SchedulingSettings()


class MediaSettings(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Images, audio and video of requests.

    Attributes:
        max_bytes: size of one file.
        max_files: files of one request.
        max_request_bytes: size of a body that uploads files (multipart, or `/v1/files`). Bodies of JSON, also
            with data URLs, are limited by `gateway.max_body_bytes`.
        max_pixels: pixels of one image, or of one frame of a video.
        max_frames: frames that a model may take from one video.
        max_seconds: duration of audio or of a video, in seconds.
        allowed_hosts: hosts from which the gateway loads media that a request names by an `http(s)` address:
            `images.example`, `host:port`, `[v6]:port`, `*.example` for all names below it, or `*` for all.
            Private addresses are only reached if their host is listed by name, loopback only as `localhost`
            or by its address. By default none.
        fetch_timeout_s: time to load one file from such a host.
        store_bytes: size limit of the stored media. Default: half of the size limit of the log.
        cache_bytes: size of a worker's local copies of media.
        decoders: the decoder processes of a worker.
        decode_timeout_s: time to decode one file.
    """

    max_bytes: Annotated[int, Meta(ge=1024)] = 256 * 1024 * 1024
    max_files: Annotated[int, Meta(ge=1, le=4096)] = 64
    max_request_bytes: Annotated[int, Meta(ge=1024)] = 1024 * 1024 * 1024
    max_pixels: Annotated[int, Meta(ge=1)] = 64 * 1024 * 1024
    max_frames: Annotated[int, Meta(ge=1)] = 2048
    max_seconds: Annotated[float, Meta(gt=0)] = 14_400.0
    allowed_hosts: list[Annotated[str, Meta(pattern=_HOST_PATTERN)]] = []
    fetch_timeout_s: Seconds = 30.0
    store_bytes: Annotated[int, Meta(ge=1 << 20)] | None = None
    cache_bytes: Annotated[int, Meta(ge=1 << 20)] = 4 << 30
    decoders: Annotated[int, Meta(ge=1, le=64)] = 2
    decode_timeout_s: Seconds = 60.0


class DeploymentConfig(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One model, its placement, and the settings of the processes.

    Recorded decisions do not depend on `data_dir` and the keys after it.

    Attributes:
        model: the model family, e.g. `decoder_lm` for decoder-only language models (…ForCausalLM).
            [Models](models.md) lists them; `dalsegno serve FOLDER` finds a checkpoint's family itself.
        checkpoint: a folder in Hugging Face format with safetensors; relative to the YAML file. Default: the
            family's usual repository in the local cache of the Hugging Face hub.
        max_seq_len: the most tokens of one sequence, prompt and answer together.
        node_groups: the placement of nodes on ranks, see below.
        name: the model name that clients use; default: the name of the YAML file.
        model_kwargs: settings of the engine and of the family (`snac` of `orpheus`), see below.
        voices: the voices of a finetune of a speech model, in addition to the model's own; the first one is
            the default. Letters, digits, `_` and `-`.
        adapters: folders of LoRA adapters as peft writes them, by name, such as `{sql: /models/sql-lora}`;
            clients address one as `MODEL:sql`. Relative to the YAML file. They cannot be unloaded.
        adapters_at_runtime: take `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, by which clients
            name further folders on this machine.
        adapters_memory_bytes: the most memory that loaded adapters take on a rank. The least recently used
            one is dropped, and read again when a request needs it.
        kv_tokens: the size of a rank's KV cache in tokens; default: derived from the free memory.
        default_max_tokens: limit of answers whose request has none, as far as the context allows.
        max_concurrent_requests: requests that are admitted at a time; the others wait in order.
        max_attempts: consecutive attempts without progress, each ended by the death of a worker, after which
            a request fails.
        walk_timeouts_s: time limits by walk, such as `{decode: 60}`; the request fails afterwards. The limit
            of a step with several walks is their sum, if each of them has one.
        scheduling: admission and the choice of replicas, see below.
        data_dir: the folder for the log of `serve` and the conductor's snapshots; default: `.dalsegno/MODEL`
            in the current folder. Relative to the YAML file.
        devices: the device of each rank, such as `{0: cuda:0, 1: cpu}`; `auto`, also the default, uses one
            GPU per rank as long as there are any, then the CPU.
        data_plane: transfer of tensors between workers, see below.
        gateway: the HTTP server, see below.
        media: images, audio and video of requests, see below.
        logs: log lines of the processes, see below.
        traces: OpenTelemetry, see below.
        nats: the NATS server that keeps the event log, see below.
        recovery: failure detection, and redundant processes, see below.
        sealing: signatures of the log, see below.
    """

    model: str
    checkpoint: str = ""
    max_seq_len: Annotated[int, Meta(ge=2)]
    node_groups: Annotated[list[NodeGroup], Meta(min_length=1)]
    name: str = ""
    model_kwargs: dict[str, Any] = {}
    voices: list[str] = []
    adapters: dict[str, str] = {}
    adapters_at_runtime: bool = False
    adapters_memory_bytes: Annotated[int, Meta(ge=1)] = 1 << 30
    kv_tokens: Annotated[int, Meta(ge=16)] | None = None
    default_max_tokens: Annotated[int, Meta(ge=1)] = 2048
    max_concurrent_requests: Annotated[int, Meta(ge=1)] = 256
    max_attempts: Annotated[int, Meta(ge=1)] = 2
    walk_timeouts_s: dict[str, Seconds] = {}
    scheduling: SchedulingSettings = DEFAULT_SCHEDULING
    data_dir: str | None = None
    devices: dict[int, str] = {}
    data_plane: DataPlaneSettings = DataPlaneSettings()
    gateway: GatewaySettings = GatewaySettings()
    media: MediaSettings = MediaSettings()
    logs: LogSettings = LogSettings()
    traces: TraceSettings = TraceSettings()
    nats: NatsSettings = NatsSettings()
    recovery: RecoverySettings = RecoverySettings()
    sealing: SealingSettings = SealingSettings()

    @property
    def groups(self) -> tuple[PlacedGroup, ...]:
        """The resolved placement: exactly one group per node and walk.

        Raises:
            PlacementError: the placement is invalid; `checks.check` reports it earlier.
        """
        return placement.resolve(self.node_groups, registry.graph(self.model))

    @property
    def ranks(self) -> list[Rank]:
        """All ranks, sorted."""
        return placement.ranks_of(self.groups)

    @property
    def leaders(self) -> list[Rank]:
        """The ranks that receive orders, sorted; every other rank follows one of them."""
        return placement.leaders_of(self.groups)

    def tp_group_of(self, rank: int) -> tuple[Rank, ...]:
        """The TP group of `rank`, leader first; `rank` alone if it shares no node."""
        return placement.tp_group_of(self.groups, rank)

    @property
    def digest(self) -> str:
        """The digest of `decisive`: independent of the settings of single processes."""
        return digest_of(self.decisive)

    @property
    def decisive(self) -> "DeploymentConfig":
        """The part that decisions depend on: process settings, and so all secrets, are reset to defaults."""
        defaults = {name: SECTIONS[name]() for name in PROCESS_SECTIONS}
        if self.scheduling == DEFAULT_SCHEDULING:  # the digest leaves out this instance only, not equal ones
            defaults["scheduling"] = DEFAULT_SCHEDULING
        return msgspec.structs.replace(self, data_dir=None, devices={}, **defaults)

    @property
    def recorded(self) -> dict[str, Any]:
        """What is stored of it: the decisive part, and all values of all sections without secrets."""
        top = {key: value for key, value in msgspec.to_builtins(self.decisive).items() if key not in SECTIONS}
        for own in ("data_dir", "devices"):
            top.pop(own, None)
        return top | {name: self._public(name) for name in SECTIONS}

    def _public(self, section: str) -> dict[str, Any]:
        values = msgspec.structs.asdict(getattr(self, section))
        public = {key: value for key, value in values.items() if f"{section}.{key}" not in SECRETS}
        text = _USERINFO.sub(f"//{MASK}@", msgspec.json.encode(public).decode())
        found: dict[str, Any] = msgspec.json.decode(text)
        return found

    @property
    def takes_adapters(self) -> bool:
        """Whether requests may name LoRA adapters."""
        return self.adapters_at_runtime or bool(self.adapters)

    @property
    def known_voices(self) -> tuple[str, ...]:
        """The voices of a speech model: the declared ones, then the family's."""
        return tuple(dict.fromkeys((*self.voices, *registry.graph(self.model).voices)))

    @property
    def placement(self) -> dict[str, int]:
        """Each node's rank; the first one of several."""
        groups = self.groups
        return placement.assign(groups, [group.ranks[0] for group in groups])[0]

    def nodes_of(self, rank: int) -> list[str]:
        """The nodes that a rank hosts."""
        return placement.nodes_on(self.groups, rank)

    def device_of(self, rank: int) -> str:
        """The configured device of a rank: `auto`, `cpu`, `mps`, `cuda` or `cuda:N`."""
        return self.devices.get(rank) or str(self.model_kwargs.get("device", "auto"))


SECTIONS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "scheduling": SchedulingSettings,
    "data_plane": DataPlaneSettings,
    "gateway": GatewaySettings,
    "media": MediaSettings,
    "logs": LogSettings,
    "traces": TraceSettings,
    "nats": NatsSettings,
    "recovery": RecoverySettings,
    "sealing": SealingSettings,
}

PROCESS_SECTIONS: Final = frozenset(SECTIONS) - {"scheduling"}
"""Sections that no decision depends on: how processes run, and where."""


NATS_FILES: Final = ("token_file", "credentials_file", "ca_file", "cert_file", "key_file")


PATHS: Final = frozenset(
    {
        "checkpoint",
        "data_dir",
        "gateway.api_keys_file",
        "sealing.key_file",
        "sealing.anchor_dir",
        *(f"nats.{name}" for name in NATS_FILES),
    }
)
"""Keys that are paths: relative to their file, or to the current folder if given by variable or flag."""


PATH_MAPS: Final = ("adapters",)
"""Keys whose values are maps of paths."""


ENGINE_PATHS: Final = ("draft_model", "draft", "calibration_text")  # `draft` is the old name
"""The engine's keys in `model_kwargs` that are paths."""


SECRETS: Final = frozenset(
    {"gateway.api_keys", "nats.password", "nats.seed", "nats.token", "sealing.anchors", "sealing.key"}
)
"""Keys that are never printed and never passed as arguments."""


MASK: Final = "***"
"""Printed instead of a secret."""


_USERINFO: Final = re.compile(r'//[^/@\s"]*@')
"""In an address: a user's name, and perhaps a password."""


def paths(family: object) -> frozenset[str]:
    """All keys that are paths: `PATHS`, and those of `model_kwargs` that engine or family declare."""
    own = registry.graph(family).paths if isinstance(family, str) and family in registry.families() else ()
    return PATHS | {f"model_kwargs.{name}" for name in (*own, *ENGINE_PATHS)}
