"""What the nodes of a bucket exchange: the newest config, the newest collections, and statistics.

Every node asks all others from time to time, and at once when it has something new. The config with the higher version
wins, and the manifest with the higher uid, so that all nodes end up with the same. Two simultaneous changes of the
collections must not get the same uid, so only the first node of the config makes changes: another node reads that
node's manifest, changes it and sends it back. The first node refuses it if another change came first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from headwater.client.bootstrap import read_manifest
from headwater.client.connection_string import Address
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.kv_connection import Login
from headwater.errors import ConnectionFailed, HeadwaterError, KeyNotFound, NoAnswer, StatusError, StoreError
from headwater.log_fields import LogEvent, fields
from headwater.node.auth.accounts import UserSharing
from headwater.node.service import BucketService
from headwater.protocol.cluster_config import NodeAddress, PublishedConfig
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.vbuckets import SetCollectionsManifest
from headwater.protocol.status import Status

logger = logging.getLogger(__name__)

ASK_EVERY_S = 5.0
"""How long a node may miss a config or a manifest that was published while it was out of reach."""
RETRY_S = 1.0
NEWS_S = 0.2
"""How long a node waits before it passes news on: a coordinator publishes to all nodes, and a node that it has not
reached yet does not know the log-in."""
START_S_MAX = 3.0
"""How long a starting node waits for the others to send a newer config."""
SHARE_S_MAX = 2.0
"""How long a change of the collections or the users waits until the other nodes have it."""
CHANGE_TRIES_MAX = 10
USER_DIGEST, USERS = "headwater-user-digest", "headwater-users"
"""Groups of `stat` for nodes: a digest of the users, and all users. If the asking node appends its own digest to the
first one, its users have changed, and the other node compares them with its own."""
_LOOK_AGAIN_S = 0.05
_OVERTAKEN = frozenset({Status.ERANGE, Status.CANNOT_APPLY_MANIFEST})
"""The statuses that refuse a manifest because another one came first."""


class Peers:
    """The other nodes of one bucket's cluster, as this node sees them."""

    def __init__(
        self,
        service: BucketService,
        *,
        login: Callable[[PublishedConfig], Login],
        adopt: Callable[[PublishedConfig], bool],
        users: UserSharing,
    ) -> None:
        self._service = service
        self._users = users
        service.node_statistics |= {USER_DIGEST: self._show_digest, USERS: self._show_users}
        self._login = login
        self._adopt = adopt
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._warned: tuple[int, int] | None = None
        """The version for which a warning has reported two different configs."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._ask_forever())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def notify(self) -> None:
        """Exchange soon: this node has something new."""
        self._news.set()

    # --- asking ---------------------------------------------------------------------------------------------------

    async def ask_before_serving(self) -> bool:
        """Ask the others until one has answered, and wait for those that can be reached. False if none answers."""
        try:
            async with asyncio.timeout(START_S_MAX):
                while not await self.exchange():
                    await asyncio.sleep(RETRY_S / 4)
        except TimeoutError:
            return False
        return True

    async def exchange(self) -> int:
        """Exchange the newest state with all others. Returns how many have answered."""
        await self._begin_or_leave_sharing()
        results = await asyncio.gather(
            *(self._exchange_with(node) for node in self._service.other_nodes()), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, HeadwaterError):
                raise result
        return sum(1 for result in results if not isinstance(result, BaseException))

    async def _ask_forever(self) -> None:
        while True:
            self._news.clear()
            answered = await self.exchange()
            wait_s = ASK_EVERY_S if answered == len(self._service.other_nodes()) else RETRY_S
            try:
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
                    await asyncio.sleep(NEWS_S)
            except TimeoutError:
                continue

    async def _exchange_with(self, node: NodeAddress) -> None:
        connection = await self._connect(node)
        try:
            self._take_config(connection)
            await self._exchange_manifests(connection)
            await self._take_users(connection)
        finally:
            connection.close()

    async def _connect(self, node: NodeAddress) -> AsyncKvConnection:
        assert self._service.config is not None
        return await _connect(node, self._login(self._service.config))

    def _take_config(self, connection: AsyncKvConnection) -> None:
        theirs = PublishedConfig.decode(connection.outcome.cluster_config or b"{}")
        ours = self._service.config
        if theirs is None or ours is None or theirs.uuid != ours.uuid:
            return
        about = fields(
            event=LogEvent.CLUSTER_CONFIG,
            bucket=theirs.bucket,
            config=theirs.revision,
            address=str(connection.address),
        )
        if theirs.version == ours.version and theirs != replace(ours, login=None) and ours.version != self._warned:
            self._warned = ours.version
            logger.warning(
                "bucket %s: %s has another config %d: two commands have changed the cluster at the same time; run "
                "`headwater cluster rebalance`",
                *(theirs.bucket, connection.address, theirs.revision),
                extra=about,
            )
        if theirs.version > ours.version:
            logger.info(
                "bucket %s: config %d comes from %s",
                *(theirs.bucket, theirs.revision, connection.address),
                extra=about,
            )
            # The config does not show the log-in. It is the same as ours, because it let this node in.
            self._adopt(replace(theirs, login=ours.login))

    # --- collections ----------------------------------------------------------------------------------------------

    async def _exchange_manifests(self, connection: AsyncKvConnection) -> None:
        theirs = await read_manifest(connection)
        ours = self._service.bucket.manifest
        if theirs.uid > ours.uid:
            self._service.set_manifest(replace(theirs, ids_used=max(ours.ids_used, theirs.ids_used)))
        elif theirs.uid < ours.uid:
            await connection.request(SetCollectionsManifest(value=ours.encode(with_ids_used=True)))

    async def change_manifest(self, change: Callable[[Manifest], Manifest]) -> Manifest:
        """Change the manifest on the first node of the cluster, and here."""
        config = self._service.config
        assert config is not None
        try:
            connection = await self._connect(config.nodes[0])
        except HeadwaterError as error:
            raise StoreError(
                f"{config.names()[0]}, which manages the collections, can't be reached: {error.reason}",
                hint="Start that node, or fail it over, and try again",
            ) from error
        try:
            return await self._change_there(connection, change)
        finally:
            connection.close()

    async def _change_there(self, connection: AsyncKvConnection, change: Callable[[Manifest], Manifest]) -> Manifest:
        for _ in range(CHANGE_TRIES_MAX):
            theirs = await read_manifest(connection)
            known = self._service.bucket.manifest
            changed = change(replace(theirs, ids_used=max(theirs.ids_used, known.ids_used)))
            try:
                await connection.request(SetCollectionsManifest(value=changed.encode(with_ids_used=True)))
            except StatusError as error:
                if error.status not in _OVERTAKEN:
                    raise
                continue
            if self._service.bucket.manifest.uid < changed.uid:
                self._service.set_manifest(changed)
            return changed
        raise StoreError("the collections keep changing", hint="Try again")

    async def share(self) -> None:
        """Share a change with the other nodes that answer soon."""
        try:
            async with asyncio.timeout(SHARE_S_MAX):
                await self.exchange()
        except TimeoutError:
            self.notify()

    # --- users ----------------------------------------------------------------------------------------------------

    async def _begin_or_leave_sharing(self) -> None:
        """Share the users of this node as long as it is in the cluster. The first node of the cluster begins."""
        config, this_node = self._service.config, self._service.this_node
        if config is None or self._users.is_shared_in(config.uuid) == (this_node is not None):
            return
        try:
            if this_node is None:
                await self._users.leave(config.uuid)
            elif this_node == 0:
                await self._users.begin(config.uuid)
        except StoreError as error:
            about = fields(event=LogEvent.STORE_FAILED, error=type(error).__name__, reason=error.reason)
            logger.warning("the users are not shared in the cluster yet: %s", error.reason, extra=about)

    async def _take_users(self, connection: AsyncKvConnection) -> None:
        """Compare the users with those of another node, and take what is newer there."""
        config = self._service.config
        if config is None or self._service.this_node is None:
            return
        theirs = await connection.statistics(USER_DIGEST)
        if theirs.get("digest") not in (None, "", self._digest()):
            await self._users.take(config.uuid, await connection.statistics(USERS))

    async def hand_over_users(self, node: NodeAddress) -> None:
        """Return once another node has the same users. Raises a `HeadwaterError` with the reason if it does not."""
        try:
            async with asyncio.timeout(SHARE_S_MAX):
                connection = await self._connect(node)
                try:
                    while not await self._has_same_users(connection):
                        await asyncio.sleep(_LOOK_AGAIN_S)
                finally:
                    connection.close()
        except TimeoutError as error:
            raise NoAnswer(f"it has not applied the change in {SHARE_S_MAX:g} s", hint="Check its log") from error
        except KeyNotFound as error:
            raise HeadwaterError("its version does not share users", hint="Upgrade that node") from error

    async def _has_same_users(self, connection: AsyncKvConnection) -> bool:
        ours = self._digest()
        theirs = await connection.statistics(f"{USER_DIGEST} {ours}".rstrip())
        return ours != "" and theirs.get("digest") == ours

    def _digest(self) -> str:
        return "" if self._service.config is None else self._users.digest(self._service.config.uuid)

    def _show_digest(self, theirs: str) -> Iterator[tuple[str, str]]:
        ours = self._digest()
        if theirs not in ("", ours):
            self.notify()
        yield "digest", ours

    def _show_users(self, argument: str) -> Iterator[tuple[str, str]]:
        config = self._service.config
        return iter(()) if config is None else self._users.pieces(config.uuid)


async def _connect(node: NodeAddress, login: Login) -> AsyncKvConnection:
    return await AsyncKvConnection.open(Address(node.host, node.kv_port_for(tls=login.tls is not None)), login)


# --- statistics -----------------------------------------------------------------------------------------------------

ANSWER_S_MAX = 3.0
"""How long a node may take to answer, including its log-in, before it counts as not answering."""


class PeerStatistics:
    """Statistics of the other nodes of a bucket's cluster, for the dashboard. Ask a node one thing at a time.

    Nodes log in to each other over the key-value protocol anyway, so the questions use it, too. The connection to each
    node is opened when it is first needed, kept between questions, and opened again if it breaks.
    """

    def __init__(self, service: BucketService, *, login: Callable[[PublishedConfig], Login]) -> None:
        self._service = service
        self._login = login
        self._connections: dict[str, AsyncKvConnection] = {}
        self._is_stopped = False

    def names(self) -> list[str]:
        """The other nodes, as the config names them."""
        return [node.kv_address for node in self._service.other_nodes()]

    async def ask(self, name: str, group: str) -> dict[str, str]:
        """A group of statistics of a node. Raises a `HeadwaterError` if there is no answer."""
        self._forget_all_but(self.names())
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                return await (await self._connection(name)).statistics(group)
        except BaseException as error:
            # Use a new connection the next time, in case the node was only slow.
            left = self._connections.pop(name, None)
            if left is not None:
                left.abort()
            if isinstance(error, TimeoutError):
                raise NoAnswer(
                    f"{name} has not answered for {ANSWER_S_MAX:g} seconds", hint="Check that node's load and log"
                ) from error
            raise

    async def _connection(self, name: str) -> AsyncKvConnection:
        known = self._connections.get(name)
        if known is not None and not known.is_closed:
            return known
        config = self._service.config
        if self._is_stopped or config is None or name not in config.names():
            raise ConnectionFailed(f"{name} is not a node of this cluster", hint="Check the cluster's config")
        node = config.nodes[config.names().index(name)]
        opened = self._connections[name] = await _connect(node, self._login(config))
        return opened

    def _forget_all_but(self, names: list[str]) -> None:
        for name in [name for name in self._connections if name not in names]:
            self._connections.pop(name).close()

    def stop(self) -> None:
        self._is_stopped = True
        self._forget_all_but([])
