"""The watch over the readers of the log: limits those of each key, and warns when there are too many.

A key that opens as many readers as the stream may have would leave none for others. So the leading conductor
looks once a second, and ends the readers that a key has beyond its limit. Its own reading does not depend on
that: without a free consumer it reads by single requests (`shared.log.nats.polling`).

The watch has a connection of its own: a server whose configuration was made by an earlier version denies it
the list of consumers, which must not end the conductor.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from shared.log.nats import api
from shared.log.nats.connection import NatsConnection
from shared.log.nats.credentials import Credentials
from shared.log.nats.reader_limit import excess
from shared.log.port import LogDeniedError, LogState, LogUnavailableError
from shared.log.reader_capacity import reader_alarm

_LOGGER: Final = logging.getLogger(__name__)

CHECK_EVERY_S: Final = 1.0
_CHECK_AGAIN_S: Final = 0.2
"""The pause after a check that ended readers: a greedy client opens them again."""
_REPORT_EVERY_S: Final = 60.0
_OPEN_S: Final = 30.0


class ReaderWatch:
    """The watch over one stream's readers.

    Attributes:
        ended: the number of readers that this watch has ended.
    """

    def __init__(self, url: str, stream: str, *, max_consumers: int, per_key: int) -> None:
        self.ended = 0
        self._connection = NatsConnection(url)
        self._connection.label += ", for the watch over readers"
        self._stream = stream
        self._max_consumers = max_consumers
        self._per_key = per_key
        self._found_max: int | None = max_consumers
        self._has_alarm = False
        self._unreported: Counter[str] = Counter()
        self._reported_s = float("-inf")

    async def open(self, credentials: Credentials, name: str) -> None:
        """Connect; `name` labels the connection on the server.

        Raises:
            LogUnavailableError: no server answers in time.
        """
        await self._connection.open(credentials=credentials, name=f"{name} readers", timeout_s=_OPEN_S)

    async def close(self) -> None:
        await self._connection.close()

    async def run(self, is_leading: Callable[[], bool]) -> None:
        """Check until cancelled; readers are ended only while `is_leading()`."""
        while True:
            before = self.ended
            if is_leading():
                try:
                    await self.check()
                except LogUnavailableError as error:
                    _LOGGER.debug("the readers cannot be checked now: %s", error)
                except LogDeniedError as error:
                    _LOGGER.warning(
                        "readers cannot be limited per key: %s; the server's configuration is older: grant "
                        "the conductor publishing to $JS.API.CONSUMER.LIST.%s",
                        error,
                        self._stream,
                    )
                    return
            await asyncio.sleep(_CHECK_AGAIN_S if self.ended > before else CHECK_EVERY_S)

    async def check(self) -> None:
        """Check once: warn, and end the readers beyond the limit of their key.

        Raises:
            LogUnavailableError: the server does not answer.
            LogDeniedError: the conductor may not list the readers.
        """
        info = await self._connection.call_api(f"$JS.API.STREAM.INFO.{self._stream}", b"", api.StreamInfo)
        if info.error is not None:
            raise LogUnavailableError(info.error.description)
        state = info.log_state()
        self._compare(state.max_consumers)
        self._warn(state)
        if state.consumers > self._per_key:
            for owner, names in excess(await self._consumers(), self._per_key).items():
                for name in names:
                    self._connection.send_empty(f"$JS.API.CONSUMER.DELETE.{self._stream}.{name}")
                self.ended += len(names)
                self._unreported[owner] += len(names)
        self._report()

    def _compare(self, found: int | None) -> None:
        """Warn when the stream's limit is found to differ from the configured one."""
        before, self._found_max = self._found_max, found
        if found not in {before, self._max_consumers}:
            _LOGGER.warning(
                "the stream %r: expected max_consumers %d (nats.max_consumers), found %s; run `dalsegno "
                "provision` with this configuration, or set nats.max_consumers to the stream's value",
                self._stream,
                self._max_consumers,
                "none, which is the server's default" if found is None else found,
            )

    def _warn(self, state: LogState) -> None:
        alarm = reader_alarm(state)
        if alarm and not self._has_alarm:
            _LOGGER.warning(alarm)
        self._has_alarm = bool(alarm)

    def _report(self) -> None:
        """Log the readers that were ended; at most once a minute, for a client that opens them again."""
        now_s = asyncio.get_running_loop().time()
        if not self._unreported or now_s < self._reported_s + _REPORT_EVERY_S:
            return
        for owner, count in self._unreported.items():
            _LOGGER.warning(
                "ended %d readers of %s: a key may have %d (nats.max_consumers_per_key); use one reader per "
                "service, not one per request",
                count,
                owner,
                self._per_key,
            )
        self._reported_s = now_s
        self._unreported.clear()

    async def _consumers(self) -> list[api.ListedConsumer]:
        subject = f"$JS.API.CONSUMER.LIST.{self._stream}"
        found: dict[str, api.ListedConsumer] = {}
        while True:
            request = msgspec.json.encode({"offset": len(found)})
            page = await self._connection.call_api(subject, request, api.ConsumerPage)
            if page.error is not None:
                raise LogUnavailableError(page.error.description)
            known = len(found)
            found |= {one.name: one for one in page.consumers}
            if len(found) == known or len(found) >= page.total:  # some may end between two pages
                return list(found.values())
