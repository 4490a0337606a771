"""The permissions of each role on a real server: every role, every kind of subject.

Each row is a subject and the roles that may publish on it or subscribe to it; all others are denied.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, Final

import nats
import nats.errors
import pytest

from shared.events import Failure, MalformedEventError, RequestFailed, decode, encode
from shared.log.nats import jetstream, nkeys
from shared.log.nats.credentials import ANONYMOUS, Credentials
from shared.log.nats.permissions import permissions
from shared.log.nats.private_server import NatsServer
from shared.log.port import Log, LogDeniedError, LogUnavailableError
from shared.subject_rules import read_event
from shared.subjects import Subjects
from tests.shared.log.roles import ROLES, SUBJECTS, guarded, plain

pytestmark = pytest.mark.processes


CLIENTS: Final = {"client", "client-billing"}
READERS: Final = set(ROLES) - {"provisioner"}
NOBODY_AT_ALL: Final[set[str]] = set()
STREAM: Final = SUBJECTS.stream
MEDIA: Final = SUBJECTS.media_stream
PIECE: Final = f"ds.media.none.{'0' * 64}.0"

PUBLISH: Final[dict[str, set[str]]] = {
    # ---- the log: who writes is in the subject ----
    "ds.request.r1": {"gateway", *CLIENTS},
    "ds.control.r1": {"gateway", *CLIENTS},
    "ds.conductor.epoch": {"conductor"},
    "ds.conductor.lost": {"conductor"},
    "ds.walk.r1": {"conductor"},
    "ds.ready.0.r1": {"conductor"},
    "ds.done.0.r1": {"worker-0"},
    "ds.done.1.r1": {"worker-1"},
    "ds.edge.0.0.r1": {"worker-0"},
    "ds.edge.1.0.r1": {"worker-0"},
    "ds.edge.0.1.r1": {"worker-1"},
    "ds.worker.0": {"worker-0"},
    "ds.worker.1": {"worker-1"},
    "ds.output.nats.r1.w0": {"worker-0"},
    "ds.output.nats.r1.w1": {"worker-1"},
    "ds.output.nats.r1.conductor": {"conductor"},
    "ds.output.nats.r1.client": NOBODY_AT_ALL,
    "ds.request": NOBODY_AT_ALL,
    "ds.request.r1.more": NOBODY_AT_ALL,
    "ds.done.0.r1.more": NOBODY_AT_ALL,
    "ds.done.00.r1": NOBODY_AT_ALL,
    "ds.worker.2": NOBODY_AT_ALL,
    "ds.refused.g-1": {"gateway"},
    "ds.refused.g-1.x": NOBODY_AT_ALL,
    "ds.batch.b-1": {"gateway"},
    "ds.beat.batch.b-1": {"gateway"},
    "ds.conversation.c-1": {"gateway"},
    "ds.nothing.r1": NOBODY_AT_ALL,
    # ---- media ----
    PIECE: {"gateway", *CLIENTS},
    f"{PIECE}.more": NOBODY_AT_ALL,
    f"$JS.API.STREAM.INFO.{MEDIA}": set(ROLES) - {"conductor"},
    f"$JS.API.STREAM.CREATE.{MEDIA}": {"provisioner"},
    f"$JS.API.STREAM.UPDATE.{MEDIA}": {"provisioner"},
    f"$JS.API.STREAM.DELETE.{MEDIA}": {"provisioner"},
    f"$JS.API.STREAM.PURGE.{MEDIA}": {"gateway"},
    f"$JS.API.STREAM.MSG.DELETE.{MEDIA}": NOBODY_AT_ALL,
    f"$JS.API.STREAM.MSG.GET.{MEDIA}": READERS - {"conductor"},
    f"$JS.API.DIRECT.GET.{MEDIA}": NOBODY_AT_ALL,
    f"$JS.API.DIRECT.GET.{MEDIA}.{PIECE}": NOBODY_AT_ALL,
    f"$JS.API.CONSUMER.CREATE.{MEDIA}": NOBODY_AT_ALL,
    f"$JS.API.CONSUMER.CREATE.{MEDIA}.x": NOBODY_AT_ALL,
    f"$JS.API.CONSUMER.CREATE.{MEDIA}.x.{PIECE}": NOBODY_AT_ALL,
    f"$JS.API.CONSUMER.DURABLE.CREATE.{MEDIA}.x": NOBODY_AT_ALL,
    f"$JS.API.CONSUMER.MSG.NEXT.{MEDIA}.x": NOBODY_AT_ALL,
    "other.request.r1": NOBODY_AT_ALL,
    # ---- outside of the log ----
    "ds.beat.worker.0": {"worker-0"},
    "ds.beat.worker.1": {"worker-1"},
    "ds.beat.conductor.c-1": {"conductor"},
    "ds.beat.gateway.g-1": NOBODY_AT_ALL,
    # ---- the stream ----
    f"$JS.API.STREAM.INFO.{STREAM}": set(ROLES),
    f"$JS.API.STREAM.CREATE.{STREAM}": {"provisioner"},
    f"$JS.API.STREAM.UPDATE.{STREAM}": {"provisioner"},
    f"$JS.API.STREAM.DELETE.{STREAM}": {"provisioner"},
    f"$JS.API.STREAM.PURGE.{STREAM}": NOBODY_AT_ALL,
    f"$JS.API.STREAM.MSG.DELETE.{STREAM}": NOBODY_AT_ALL,
    f"$JS.API.STREAM.SNAPSHOT.{STREAM}": NOBODY_AT_ALL,
    f"$JS.API.STREAM.RESTORE.{STREAM}": NOBODY_AT_ALL,
    f"$JS.API.STREAM.LEADER.STEPDOWN.{STREAM}": NOBODY_AT_ALL,
    f"$JS.API.STREAM.PEER.REMOVE.{STREAM}": NOBODY_AT_ALL,
    "$JS.API.STREAM.CREATE.OTHER": NOBODY_AT_ALL,
    "$JS.API.STREAM.DELETE.OTHER": NOBODY_AT_ALL,
    "$JS.API.STREAM.INFO.OTHER": NOBODY_AT_ALL,
    "$JS.API.STREAM.LIST": NOBODY_AT_ALL,
    "$JS.API.STREAM.NAMES": NOBODY_AT_ALL,
    "$JS.API.INFO": NOBODY_AT_ALL,
    # ---- reading it ----
    f"$JS.API.STREAM.MSG.GET.{STREAM}": READERS,
    f"$JS.API.CONSUMER.CREATE.{STREAM}.x": READERS,
    f"$JS.API.CONSUMER.DELETE.{STREAM}.x": READERS,
    f"$JS.FC.{STREAM}.x.y": READERS,
    f"$JS.API.CONSUMER.CREATE.{STREAM}": {"reader", *CLIENTS},
    f"$JS.API.CONSUMER.CREATE.{STREAM}.x.ds.walk.r1": {"reader", *CLIENTS},
    f"$JS.API.CONSUMER.INFO.{STREAM}.x": {"reader", *CLIENTS},
    "$JS.API.CONSUMER.CREATE.OTHER.x": NOBODY_AT_ALL,
    f"$JS.API.CONSUMER.DURABLE.CREATE.{STREAM}.x": NOBODY_AT_ALL,
    f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.x": NOBODY_AT_ALL,
    f"$JS.API.CONSUMER.LIST.{STREAM}": {"conductor"},
    f"$JS.API.CONSUMER.NAMES.{STREAM}": NOBODY_AT_ALL,
    f"$JS.API.DIRECT.GET.{STREAM}": NOBODY_AT_ALL,
    f"$JS.API.DIRECT.GET.{STREAM}.ds.walk.r1": NOBODY_AT_ALL,
    f"$JS.ACK.{STREAM}.x.1.1.1.1.0": NOBODY_AT_ALL,
    # ---- others ----
    "_INBOX.x": NOBODY_AT_ALL,
    **{f"{shown.inbox_prefix}.x": NOBODY_AT_ALL for shown in ROLES.values()},
    "$SYS.REQ.SERVER.PING": NOBODY_AT_ALL,
    "$SRV.PING": NOBODY_AT_ALL,
    "anything": NOBODY_AT_ALL,
}

SUBSCRIBE: Final[dict[str, set[str]]] = {
    **{f"{shown.inbox_prefix}.x.*": {role} for role, shown in ROLES.items()},
    "_INBOX.x.*": CLIENTS,
    "ds.beat.>": {"conductor", "gateway", "reader", *CLIENTS},
    "ds.walk.r1": {"reader", *CLIENTS},
    "ds.output.nats.r1.*": {"reader", *CLIENTS},
    "ds.conductor.epoch": {"reader", *CLIENTS},
    "ds.worker.*": {"reader", *CLIENTS},
    "ds.request.*": {"reader"},
    "ds.ready.0.*": {"reader"},
    "ds.media.none.*.*": {"reader"},
    "ds.>": {"reader"},
    "other.>": NOBODY_AT_ALL,
    ">": NOBODY_AT_ALL,
    "*.>": NOBODY_AT_ALL,
    "_INBOX.>": CLIENTS,
    "$JS.>": NOBODY_AT_ALL,
    "$JS.API.>": NOBODY_AT_ALL,
    f"$JS.API.CONSUMER.CREATE.{STREAM}.*": NOBODY_AT_ALL,
    "$JS.EVENT.ADVISORY.>": NOBODY_AT_ALL,
    "$SYS.>": NOBODY_AT_ALL,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with guarded(tmp_path_factory.mktemp("guarded")) as server:
        asyncio.run(jetstream.provision(server.url, ROLES["provisioner"], SUBJECTS))
        yield server


@pytest.fixture
async def conductor(server: NatsServer) -> AsyncIterator[Log]:
    log = await connect(server, "conductor")
    yield log
    await log.close()


async def connect(server: NatsServer, role: str) -> jetstream.JetStreamLog:
    return await jetstream.connect(server.url, credentials=ROLES[role], subjects=SUBJECTS, name=role)


# ---- the matrix ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("role", ROLES)
async def test_a_role_publishes_what_is_its_own_and_nothing_else(
    server: NatsServer, conductor: Log, role: str
) -> None:
    before = await conductor.state()
    async with plain(server, role) as client:
        for subject in PUBLISH:
            await client.publish(subject, b"junk that is no question either")
        denied = set(await client.settle())

    expected = {f'publish to "{at.lower()}"' for at, allowed in PUBLISH.items() if role not in allowed}
    assert denied == expected
    assert (await conductor.state()).created_ns == before.created_ns  # no client recreated it


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_hears_what_is_for_it_and_nothing_else(server: NatsServer, role: str) -> None:
    async with plain(server, role) as client:
        for subject in SUBSCRIBE:
            await client.subscribe(subject)
        denied = set(await client.settle())

    expected = {f'subscription to "{at.lower()}"' for at, allowed in SUBSCRIBE.items() if role not in allowed}
    assert denied == expected


@pytest.mark.parametrize(
    "shown",
    [
        ANONYMOUS,
        Credentials(token="sesame"),
        Credentials(user="client", password="simsim"),
        Credentials(user="conductor", password=""),
        Credentials(seed=nkeys.new_seed()),
    ],
    ids=["nothing", "a token", "a wrong password", "a name", "an unknown key"],
)
async def test_whoever_is_no_role_does_not_come_in(server: NatsServer, shown: Credentials) -> None:
    with pytest.raises(LogUnavailableError, match="refused"):
        await jetstream.connect(server.url, credentials=shown, subjects=SUBJECTS, name="a stranger")


async def test_knowing_a_public_key_is_not_having_the_key(server: NatsServer) -> None:
    class Liar(Credentials):
        def sign(self, nonce: str) -> bytes:
            return nkeys.sign(nkeys.new_seed(), nonce)

    liar = Liar(seed=ROLES["conductor"].seed)
    with pytest.raises(LogUnavailableError, match="refused the key U"):
        await jetstream.connect(server.url, credentials=liar, subjects=SUBJECTS, name="a liar")


def test_there_are_no_other_roles() -> None:
    for role in (
        "",
        "worker",
        "worker-",
        "worker--1",
        "worker-1.*",
        "worker-*",
        "client-a.b",
        "client-",
        "admin",
    ):
        with pytest.raises(ValueError, match="unknown role"):
            permissions(role, SUBJECTS, "_INBOX")


def test_no_role_is_granted_the_api_as_a_whole() -> None:
    for role, shown in ROLES.items():
        may = permissions(role, SUBJECTS, shown.inbox_prefix)
        assert not {">", "$JS.>", "$JS.API.>", "$JS.API.STREAM.>", "$JS.API.CONSUMER.>"} & {
            *may.publish,
            *may.subscribe,
        }
        assert all(
            STREAM in subject or MEDIA in subject for subject in may.publish if subject.startswith("$")
        )


# ---- each role can do its work -----------------------------------------------------------------------------
OWN: Final = {
    "conductor": ["ds.conductor.epoch", "ds.walk.r1", "ds.ready.0.r1", "ds.output.nats.r1.conductor"],
    "gateway": ["ds.request.r1", "ds.control.r1", "ds.refused.g-1", "ds.batch.b-1"],
    "worker-1": ["ds.worker.1", "ds.done.1.r1", "ds.edge.0.1.r1", "ds.output.nats.r1.w1"],
    "client": ["ds.request.r2", "ds.control.r2"],
    "client-billing": ["ds.request.r3", "ds.control.r3"],
    "reader": [],
}


@pytest.mark.parametrize("role", OWN)
async def test_a_role_writes_its_own_and_reads_all(server: NatsServer, conductor: Log, role: str) -> None:
    for number in range(3000):  # more than fits into one window: flow control has to continue
        conductor.post("ds.walk.long", b"%d" % number * 200)
    await conductor.drain()
    log = await connect(server, role)
    try:
        stored = [await log.publish(subject, b"its own") for subject in OWN[role]]
        async with asyncio.timeout(30), aclosing(log.history(SUBJECTS.logged())) as records:
            read = {record.seq: record.subject async for record in records}
        last = await log.last("ds.walk.long")
    finally:
        await log.close()

    assert [read[seq] for seq in stored] == OWN[role]
    assert last is not None
    assert read[last.seq] == "ds.walk.long"


async def test_a_worker_reads_live_what_is_for_it(server: NatsServer, conductor: Log) -> None:
    log = await connect(server, "worker-0")
    try:
        start_seq = (await log.state()).last_seq + 1
        async with asyncio.timeout(30), aclosing(log.read(SUBJECTS.for_worker(0), start_seq)) as records:
            await conductor.publish(SUBJECTS.ready(0, "r1"), b"go")
            assert (await anext(records)).data == b"go"
    finally:
        await log.close()


async def test_beats_are_heard(server: NatsServer, conductor: Log) -> None:
    worker = await connect(server, "worker-0")
    try:
        async with asyncio.timeout(30), aclosing(conductor.listen(SUBJECTS.heartbeats())) as beats:
            heard = asyncio.ensure_future(anext(beats))
            while not heard.done():
                await worker.send_heartbeat(SUBJECTS.heartbeat("worker", "0"), b"alive")
                await asyncio.wait({heard}, timeout=0.05)
            assert heard.result() == ("ds.beat.worker.0", b"alive")
    finally:
        await worker.close()


# ---- what is denied is said --------------------------------------------------------------------------------
async def test_a_denied_event_is_a_typed_error_and_is_not_sent_for_ever(server: NatsServer) -> None:
    log = await connect(server, "worker-0")
    try:
        with pytest.raises(LogDeniedError, match=r'the key U\w+: .* to "ds\.walk\.r1"; give each role'):
            async with asyncio.timeout(30):
                await log.publish(SUBJECTS.walk("r1"), b"as the conductor")
        with pytest.raises(LogDeniedError):
            log.post(SUBJECTS.done(0, "r1"), b"its own, but it was told")
    finally:
        await log.close()


async def test_a_denied_post_ends_whoever_reads(server: NatsServer) -> None:
    log = await connect(server, "worker-0")
    try:
        async with asyncio.timeout(30), aclosing(log.read([SUBJECTS.walk("nobody")], 1)) as records:
            log.post(SUBJECTS.done(1, "r1"), b"as another")
            with pytest.raises(LogDeniedError, match=r'publish to "ds\.done\.1\.r1"'):
                await anext(records)
    finally:
        await log.close()


async def test_a_role_that_may_not_read_is_told_at_once(server: NatsServer) -> None:
    log = await connect(server, "provisioner")
    try:
        with pytest.raises(LogDeniedError, match=r"publish to .*stream\.msg\.get"):
            await log.last(SUBJECTS.epoch)
    finally:
        await log.close()


@pytest.mark.parametrize("role", sorted(set(ROLES) - {"provisioner"}))
async def test_only_the_provisioner_makes_a_stream(server: NatsServer, role: str) -> None:
    with pytest.raises(LogDeniedError, match=r"stream\.create"):
        await jetstream.provision(server.url, ROLES[role], SUBJECTS)


async def test_another_deployment_on_the_server_is_out_of_reach(server: NatsServer) -> None:
    with pytest.raises(LogDeniedError, match=r"stream\.info\.other_log"):
        await jetstream.connect(
            server.url, credentials=ROLES["conductor"], subjects=Subjects("other"), name="lost"
        )


# ---- no way round -----------------------------------------------------------------------------------------
async def test_what_the_server_can_be_made_to_write_is_no_event(server: NatsServer, conductor: Log) -> None:
    """Replies go to any subject that the requester names, so they must not be valid events."""
    before = (await conductor.state()).last_seq
    targets = [
        SUBJECTS.request("victim"),
        SUBJECTS.control("victim"),
        SUBJECTS.walk("victim"),
        SUBJECTS.epoch,
    ]
    async with plain(server, "reader") as reader, plain(server, "worker-0") as worker:
        for target in targets:
            await reader.publish(f"$JS.API.STREAM.MSG.GET.{STREAM}", b'{"seq": 1}', reply=target)
            await reader.publish(f"$JS.API.STREAM.INFO.{STREAM}", b"", reply=target)
            await reader.publish(f"$JS.API.CONSUMER.CREATE.{STREAM}.odd", b"{}", reply=target)
            await worker.publish("ds.done.0.r1", b"acked there", reply=target)
        assert [*await reader.settle(), *await worker.settle()] == []
    found: dict[str, list[bytes]] = {target: [] for target in targets}
    async with asyncio.timeout(30), aclosing(conductor.read(targets, before + 1)) as records:
        while any(len(texts) < 4 for texts in found.values()):
            record = await anext(records)
            found[record.subject].append(record.data)

    for subject, texts in found.items():
        parsed = SUBJECTS.parse(subject)
        assert parsed is not None
        for text in texts:
            assert json.loads(text)  # the server's own words
            with pytest.raises(MalformedEventError):
                decode(text, parsed.kind)


async def test_no_granted_request_puts_the_bytes_of_a_medium_into_the_log(
    server: NatsServer, conductor: Log
) -> None:
    """The bytes of a medium are a client's: an event that only the conductor may write."""
    failure = Failure(code="forged", message="", status=500)
    forged = encode(
        RequestFailed(id="forged", request_id="victim", failure=failure, history=b"", writer="conductor")
    )
    before = (await conductor.state()).last_seq
    target = SUBJECTS.walk("victim")
    async with plain(server, "gateway") as gateway:
        await gateway.publish(PIECE, forged, reply=target)
        asked = [
            (f"$JS.API.STREAM.MSG.GET.{MEDIA}", json.dumps({"last_by_subj": PIECE}).encode()),
            (f"$JS.API.STREAM.INFO.{MEDIA}", json.dumps({"subjects_filter": "ds.media.>"}).encode()),
            (f"$JS.API.STREAM.PURGE.{MEDIA}", json.dumps({"filter": "ds.media.none.other.*"}).encode()),
        ]
        for subject, request in asked:
            await gateway.publish(subject, request, reply=target)
        assert await gateway.settle() == []
        await gateway.publish(PIECE, forged, headers={"Nats-Trace-Dest": target})
        assert await gateway.settle() == ['publish to "ds.walk.victim"']
    async with asyncio.timeout(30), aclosing(conductor.read([">"], before + 1)) as records:
        stored = [await anext(records) for _ in range(4)]

    assert {record.subject for record in stored} == {target}
    for record in stored:
        with pytest.raises(MalformedEventError):
            read_event(record, SUBJECTS)


async def test_a_consumer_or_a_direct_get_of_media_would_be_a_way_into_the_log(
    nats_server: NatsServer, subjects: Subjects
) -> None:
    """Try what is granted to nobody, as a client with all permissions: it delivers media to the log."""
    await jetstream.provision(nats_server.url, nats_server.credentials, subjects)
    log = await jetstream.connect(
        nats_server.url, credentials=nats_server.credentials, subjects=subjects, name="test"
    )
    client = await nats.connect(nats_server.url, token=nats_server.token)
    piece, target, stream = subjects.medium("none", "0" * 64, 0), subjects.walk("r"), subjects.media_stream
    try:
        await client.jetstream().publish(piece, b"anything I like")
        await client.subscribe(target)  # a consumer delivers only to a subscriber of exactly its subject
        config = {"name": "push", "ack_policy": "none", "deliver_subject": target, "deliver_policy": "all"}
        request = json.dumps({"stream_name": stream, "config": config}).encode()
        made = await client.request(f"$JS.API.CONSUMER.CREATE.{stream}.push", request)
        assert "error" not in json.loads(made.data)
        async with asyncio.timeout(30), aclosing(log.read([">"], 1)) as records:
            assert (await anext(records)).data == b"anything I like"
        direct = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"")
        assert not json.loads(direct.data)["config"].get("allow_direct", False)
    finally:
        await client.close()
        await log.close()


async def consumer(client: Any, name: str, deliver: str | None, **more: object) -> Any:
    told = {
        "name": name,
        "ack_policy": "none",
        "deliver_policy": "all",
        "num_replicas": 1,
        "mem_storage": True,
    }
    request = {
        "stream_name": STREAM,
        "config": told | ({"deliver_subject": deliver} if deliver else {}) | more,
    }
    answer = await client.request(f"$JS.API.CONSUMER.CREATE.{STREAM}.{name}", json.dumps(request).encode())
    return json.loads(answer.data).get("error")


@pytest.mark.parametrize(
    "target", ["ds.walk.victim", "ds.request.victim", "ds.conductor.epoch", "ds.done.0.r1"]
)
async def test_a_consumer_does_not_deliver_into_the_log(server: NatsServer, target: str) -> None:
    async with plain(server, "client") as client:
        refusal = await consumer(client, "into-the-log", target)

    assert refusal["err_code"] == 10081  # the deliver subject forms a cycle


async def test_a_consumer_delivers_no_beats_and_no_orders_to_the_server(
    server: NatsServer, conductor: Log
) -> None:
    await conductor.publish(SUBJECTS.walk("r1"), b"as if it were a beat")
    targets = ["ds.beat.worker.0", f"$JS.API.STREAM.DELETE.{STREAM}", f"$JS.API.STREAM.PURGE.{STREAM}"]
    async with asyncio.timeout(30), plain(server, "client") as client, plain(server, "client") as listener:
        beats = await listener.subscribe("ds.beat.>")
        inbox = client.new_inbox()
        delivered = await client.subscribe(inbox)
        assert [*await client.settle(), *await listener.settle()] == []
        heard = asyncio.ensure_future(anext(aiter(conductor.listen(SUBJECTS.heartbeats()))))
        for number, target in enumerate(targets):
            assert await consumer(client, f"abuse-{number}", target) is None
            assert await consumer(client, f"empty-{number}", target, headers_only=True) is None
        assert await consumer(client, "own", inbox) is None
        await delivered.next_msg()  # by now the others would have been delivered to

        assert beats.pending_msgs == 0
        assert not heard.done()
        assert (await conductor.state()).messages > 0
        heard.cancel()


async def test_what_is_granted_to_nobody_would_be_a_way_into_the_log(
    nats_server: NatsServer, subjects: Subjects
) -> None:
    """Try CONSUMER.MSG.NEXT and DIRECT.GET as a client with all permissions."""
    await jetstream.provision(nats_server.url, nats_server.credentials, subjects)
    log = await jetstream.connect(
        nats_server.url, credentials=nats_server.credentials, subjects=subjects, name="test"
    )
    client = await nats.connect(nats_server.url, token=nats_server.token)
    try:
        await log.publish(subjects.request("mine"), b"anything I like")
        config = {"name": "pull", "ack_policy": "none", "deliver_policy": "all"}
        request = json.dumps({"stream_name": subjects.stream, "config": config})
        made = await client.request(f"$JS.API.CONSUMER.CREATE.{subjects.stream}.pull", request.encode())
        everywhere = [subjects.request("mine"), subjects.epoch, subjects.walk("theirs")]
        async with asyncio.timeout(30), aclosing(log.read(everywhere, 1)) as records:
            stored = [await anext(records)]
            pull, direct = (
                f"$JS.API.{verb}.{subjects.stream}" for verb in ("CONSUMER.MSG.NEXT", "DIRECT.GET")
            )
            await client.publish(f"{pull}.pull", b"1", reply=subjects.epoch)
            stored.append(await anext(records))
            await client.publish(direct, b'{"seq": 1}', reply=subjects.walk("theirs"))
            stored.append(await anext(records))
        assert "error" not in json.loads(made.data)
        assert [(record.subject, record.data) for record in stored] == [
            (subjects.request("mine"), b"anything I like"),
            (subjects.request("mine"), b"anything I like"),  # an old event after newer ones
            (subjects.walk("theirs"), b"anything I like"),  # as if the conductor had said it
        ]
    finally:
        await client.close()
        await log.close()
