"""A bucket's membership in a cluster: stores the config that the coordinator published, and applies it.

`bucket_lifecycle` keeps one `ClusterMembership` for each bucket. A newer config is durable before the coordinator gets
its answer. It changes the states of vbuckets, then what is replicated from where. A restarted node asks the other nodes
of its stored config for theirs before it serves: it may have been failed over meanwhile, and must not accept writes
that no client will ever see.

`apply_config` gives the vbuckets of this node their states. For a vbucket whose active node the config knows:

    this node is…                the state here becomes…
    its active node              unchanged, as the coordinator promotes it; its topology becomes that of the config
    a replica, or building       replica
    neither, but in the cluster  dead if it accepted writes; removed once the config is settled
    not in the cluster           dead if it accepted writes; the data is kept in case the node is added again
    handed over (to or from)     unchanged: the takeover decides
    frozen                       unchanged: the coordinator decides

Apart from takeovers and `set-vbucket`, an active vbucket is demoted only here: if a newer config names another active
node, or leaves this node out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from headwater.client.kv_connection import FEATURES, Login, Timeouts
from headwater.errors import DataDamaged, HeadwaterError, InvalidInput, LocalProtocolError, MalformedJson, StoreError
from headwater.log_fields import LogEvent, fields
from headwater.node.auth.accounts import UserSharing
from headwater.node.commit_loop import CommitLoop
from headwater.node.options import BucketSettings, NodeOptions, peer_context
from headwater.node.replication.peers import Peers, PeerStatistics
from headwater.node.replication.replicator import ReplicationManager
from headwater.node.service import BucketService, DcpSession
from headwater.protocol.cluster_config import NO_NODE, NodeAddress, PublishedConfig
from headwater.protocol.features import WITH_COLLECTIONS, Feature, Opcode
from headwater.protocol.frames import HEADER_BYTES, decode_frame
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.dcp_changes import SystemEvent
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.sasl import Credentials, Mechanism
from headwater.protocol.status import RequestRefused, Status
from headwater.store.bucket import Bucket
from headwater.store.data_format import VBucketFacts
from headwater.store.settling import remove_vbuckets, roll_back

_TAKES_WRITES = frozenset({VBucketState.ACTIVE, VBucketState.PENDING})


def apply_config(service: BucketService, config: PublishedConfig, this_node: int | None) -> list[int]:
    """Apply a newer config to the states of the vbuckets. Returns the vbuckets to remove."""
    bucket = service.bucket
    names = config.names()
    surplus: list[int] = []
    for vbucket, row in enumerate(config.rows):
        facts = bucket.vbuckets.facts[vbucket]
        state = None if facts is None else facts.state
        if this_node is None:
            _stop_writes(service, vbucket, state)
        elif vbucket in config.handing_over:
            if config.is_handed_over_to(vbucket, this_node):
                _prepare_to_take_over(bucket, vbucket, state, config)
        elif row[0] == this_node:
            _set_topology(bucket, vbucket, facts, [None if node == NO_NODE else names[node] for node in row])
        elif config.is_holder(vbucket, this_node):
            _make_replica(service, vbucket, state, has_active=row[0] != NO_NODE)
        elif state is not None and row[0] != NO_NODE:
            _stop_writes(service, vbucket, state)
            surplus.append(vbucket)
    return surplus if config.settled else []


def replicated(service: BucketService, config: PublishedConfig, this_node: int | None) -> dict[int, list[int]]:
    """The vbuckets that this node replicates, by the index of their active node."""
    sources: dict[int, list[int]] = {}
    if this_node is None:
        return sources
    for vbucket, row in enumerate(config.rows):
        if row[0] in (NO_NODE, this_node) or vbucket in config.handing_over:
            continue
        facts = service.bucket.vbuckets.facts[vbucket]
        is_replica = facts is not None and facts.state == VBucketState.REPLICA
        if is_replica and config.is_holder(vbucket, this_node):
            sources.setdefault(row[0], []).append(vbucket)
    return sources


def _set_topology(bucket: Bucket, vbucket: int, facts: VBucketFacts | None, chain: list[str | None]) -> None:
    if facts is not None and facts.state == VBucketState.ACTIVE and facts.topology != (chain,):
        bucket.set_vbucket_facts(vbucket, replace(facts, topology=(chain,)))


def _prepare_to_take_over(bucket: Bucket, vbucket: int, state: VBucketState | None, config: PublishedConfig) -> None:
    """Make durable writes wait from the moment when the vbucket becomes active here until a config says so.

    Its chain can't be satisfied until then: it needs the node that hands it over, whose copy is dead by then.
    """
    if state is None:
        bucket.set_vbucket_state(vbucket, VBucketState.REPLICA)
    facts = bucket.vbuckets.facts[vbucket]
    assert facts is not None
    if config.replicas and facts.state != VBucketState.ACTIVE and config.rows[vbucket][0] != NO_NODE:
        names = config.names()
        chain = [names[config.handing_over[vbucket]], names[config.rows[vbucket][0]]]
        bucket.set_vbucket_facts(vbucket, replace(facts, topology=(chain,)))


def _make_replica(service: BucketService, vbucket: int, state: VBucketState | None, *, has_active: bool) -> None:
    if state is None or (state != VBucketState.REPLICA and has_active):
        service.bucket.set_vbucket_state(vbucket, VBucketState.REPLICA)
        service.forget_locks({vbucket})


def _stop_writes(service: BucketService, vbucket: int, state: VBucketState | None) -> None:
    if state in _TAKES_WRITES:
        service.bucket.set_vbucket_state(vbucket, VBucketState.DEAD)
        service.forget_locks({vbucket})


# --- takeovers ----------------------------------------------------------------------------------------------------


def end_takeovers(service: BucketService, config: PublishedConfig, this_node: int | None) -> None:
    """End the connections of takeovers that a newer config does not name.

    A coordinator may die, or be replaced by another one, during its takeovers. The next one publishes a config that
    freezes their vbuckets. Once both nodes have it, the old takeover can change no state any more: the vbucket does not
    become active on the node that takes over, nor dead on the node that hands over.
    """
    for session in list(service.dcp_sessions.values()):
        if _takes_over(session, config, this_node) or _hands_over(session, config):
            session.end_dcp()


def _takes_over(session: DcpSession, config: PublishedConfig, this_node: int | None) -> bool:
    takeovers = () if session.consumer is None else session.consumer.takeovers()
    return any(not config.is_handed_over_to(vbucket, this_node) for vbucket in takeovers)


def _hands_over(session: DcpSession, config: PublishedConfig) -> bool:
    streams = {} if session.dcp is None else session.dcp.streams
    return any(
        stream.is_takeover and (vbucket not in config.handing_over or config.is_frozen(vbucket))
        for (vbucket, _), stream in streams.items()
    )


# --- the failover drill --------------------------------------------------------------------------------------------
# The drill acts like the promotion of a copy that lags: the changes that it lacks are lost, a new branch of history
# begins, streams of the vbucket end, and a consumer that has more changes has to roll back when it requests its stream
# again. For a consumer this is a real failover, and it can't be undone.


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """The result of a drill."""

    vbucket: VBucketId
    to_seqno: Seqno
    """The requested seqno, or 0 if that lies before the history window."""
    vbuuid: Vbuuid
    """The branch that begins at `to_seqno`."""
    high_seqno_before: Seqno


def roll_back_vbucket(service: BucketService, vbucket: VBucketId, to_seqno: Seqno) -> RolledBack:
    """Roll an active vbucket back. The bucket must be at rest: nothing in flight, no housekeeping under way."""
    bucket = service.bucket
    high_seqno = _checked_high_seqno(bucket, vbucket, to_seqno)
    bucket.commit_now()
    facts = bucket.vbuckets.facts[vbucket]
    assert facts is not None
    kept_seqno = to_seqno if to_seqno >= facts.history_start_seqno else Seqno(0)
    # As in a failover, where the cluster gives a promoted copy the collections that it does not know.
    events = list(_events_after(bucket, vbucket, kept_seqno))
    reached = roll_back(bucket, vbucket, to_seqno, branch=True)
    bucket.enter_again(vbucket, events)
    had = Seqno(high_seqno - len(events))
    service.history.rolled_back(vbucket, kept=reached, had=max(had, reached), is_drill=True)
    service.on_change()
    service.sync_writes.evaluate(vbucket)
    service.on_rolled_back(vbucket)
    rolled = bucket.vbuckets.facts[vbucket]
    assert rolled is not None
    return RolledBack(
        vbucket=vbucket,
        to_seqno=reached,
        vbuuid=rolled.failover_log.newest.vbuuid,
        high_seqno_before=high_seqno,
    )


def _checked_high_seqno(bucket: Bucket, vbucket: VBucketId, to_seqno: Seqno) -> Seqno:
    numbers = bucket.vbuckets
    state = numbers.state(vbucket) if numbers.exists(vbucket) else None
    if state is None:
        raise InvalidInput(f"there is no vbucket {vbucket}", hint=f"The bucket has {len(numbers)}, counted from 0")
    if state != VBucketState.ACTIVE:
        raise InvalidInput(f"vbucket {vbucket} is {state.name.lower()}", hint="Use one that is active")
    high_seqno = numbers.high_seqno(vbucket)
    if to_seqno > high_seqno:
        raise InvalidInput(
            f"seqno {to_seqno} is beyond the high seqno {high_seqno} of vbucket {vbucket}",
            hint=f"Use one from 0 to {high_seqno}",
        )
    return high_seqno


def _events_after(bucket: Bucket, vbucket: VBucketId, seqno: Seqno) -> Iterator[SystemEvent]:
    if bucket.manifest.uid == 0:
        # There has never been any collection except the default one.
        return
    for run in bucket.runs(vbucket, after_seqno=seqno):
        at = 0
        while at < len(run):
            if run[at + 1] == Opcode.DCP_SYSTEM_EVENT:
                decoded = decode_frame(run[at:].data)
                assert decoded is not None, "stored frames are whole"
                event = decode_message(decoded[0], WITH_COLLECTIONS)
                assert isinstance(event, SystemEvent)
                if event.seqno > seqno:
                    yield event
            at += HEADER_BYTES + int.from_bytes(run[at + 8 : at + 12])


# --- the membership ---------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

CLUSTER_CONFIG = b"cluster-config"
"""The key in the bucket's own table."""
_REMOVE_TOGETHER = 64
"""How many vbuckets are removed at a time. No client is served meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSettings:
    """What a membership needs from its node."""

    login: Callable[[str, Credentials | None], Login]
    """Returns how to log in to another node, for a bucket."""
    random_bytes: Callable[[int], bytes]
    now_s: Callable[[], float]
    on_config: Callable[[], None]
    """Called when there is a newer config."""
    on_login: Callable[[str, Credentials | None], None]
    """Called with a bucket and the credentials to accept from its other nodes; None to accept none."""
    users: UserSharing
    """The users of the node, which all its clusters share."""


def is_member(bucket: Bucket) -> bool:
    """Whether a bucket is in a cluster."""
    return bucket.stored_row(CLUSTER_CONFIG) is not None


class ClusterMembership:
    """The cluster membership of a bucket. Every bucket has one, even if it is in no cluster."""

    def __init__(self, service: BucketService, loop: CommitLoop, settings: MemberSettings) -> None:
        self.service = service
        self._loop = loop
        self._settings = settings
        self._address: NodeAddress | None = None
        self.shown_config: bytes = b""
        """The config as clients of the bucket receive it."""
        self._admitted: Credentials | None = None
        """The credentials that are accepted from the other nodes."""
        self._removing: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._manifest_uid = service.bucket.manifest.uid
        self.replication = ReplicationManager(
            service, login=self._login, random_bytes=settings.random_bytes, now_s=settings.now_s
        )
        self.peers = Peers(service, login=self._login, adopt=self.adopt, users=settings.users)
        self.peer_statistics = PeerStatistics(service, login=self._login)
        self._load()

    @property
    def config(self) -> PublishedConfig | None:
        return self.service.config

    @property
    def this_node(self) -> int | None:
        """The index of this node in the config; None if the config does not have it."""
        return self.service.this_node

    def _set_config(self, config: PublishedConfig) -> None:
        self.service.config = config
        self.service.this_node = None if self._address is None else config.index_of(self._address)
        self.shown_config = config.encode(this_node=self.this_node)

    def _login(self, config: PublishedConfig) -> Login:
        return self._settings.login(config.bucket, config.login)

    def _load(self) -> None:
        stored = self.service.bucket.stored_row(CLUSTER_CONFIG)
        if stored is None:
            return
        try:
            self.service.config = PublishedConfig.decode(stored)
        except MalformedJson as error:
            raise DataDamaged(
                f"the cluster config of bucket {self.service.name} is damaged: {error.reason}",
                hint="Restore the data from a backup, or start the node on an empty data folder and add it again",
            ) from error
        if self.config is not None and len(self.config.nodes) > 1:
            self.service.is_waiting = True

    # --- starting and stopping ------------------------------------------------------------------------------------

    async def start(self, address: NodeAddress) -> None:
        """Ask the other nodes for their config, then start to replicate. The node can be reached at `address`."""
        self._address = address
        if self.config is not None:
            self._set_config(self.config)
            self._admit_nodes(self.config)
            await self._ask_others(self.config)
            self._replicate()
        self.peers.start()

    async def _ask_others(self, stored: PublishedConfig) -> None:
        if self.service.is_waiting and not await self.peers.ask_before_serving():
            logger.warning(
                "bucket %s: no other node of the cluster can be reached; going on with config %d",
                *(stored.bucket, stored.revision),
                extra=fields(event=LogEvent.CLUSTER_CONFIG, bucket=stored.bucket, config=stored.revision),
            )
        if self.config is stored and self.this_node is None:
            # With another address it is another node to the rest of the cluster, so it must accept no writes.
            logger.warning(
                "bucket %s: this node is not in config %d of its cluster",
                *(stored.bucket, stored.revision),
                extra=fields(event=LogEvent.CLUSTER_CONFIG, bucket=stored.bucket, config=stored.revision, vbuckets=0),
            )
            apply_config(self.service, stored, None)
            self.service.on_change()
        self.service.is_waiting = False

    def ask_again(self) -> None:
        """Stop serving until the other nodes were asked: this one was suspended, and may have been failed over."""
        is_asking = self._asking is not None and not self._asking.done()
        if self._address is None or self.config is None or len(self.config.nodes) == 1 or is_asking:
            return
        config, self.service.is_waiting = self.config, True
        logger.warning(
            "bucket %s: the node stood still; it asks the other nodes before it serves again",
            config.bucket,
            extra=fields(event=LogEvent.CLUSTER_CONFIG, bucket=config.bucket, config=config.revision),
        )
        self._asking = asyncio.create_task(self._ask_others(self.config))

    async def stop(self) -> None:
        # Without an address no config is adopted: it would restart what stops here.
        self._address = None
        for task in (self._removing, self._asking):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self.peer_statistics.stop()
        await self.peers.stop()
        await self.replication.stop()

    async def leave(self) -> None:
        """Stop accepting log-ins of the cluster's other nodes, because the bucket was dropped."""
        self._settings.on_login(self.service.name, None)
        if self.config is not None:
            # If the users can't be stored now, they still name this cluster, which does no harm.
            with contextlib.suppress(StoreError):
                await self._settings.users.leave(self.config.uuid)

    # --- a newer config -------------------------------------------------------------------------------------------

    def adopt(self, config: PublishedConfig) -> bool:
        """Apply a config. Returns False if it is no newer. The commit that is pending then makes it durable.

        The current config is applied again, because the commit that should have stored it may have failed.
        """
        if self._address is None:
            # Without an address the node can't find itself in the config, and would stop all its active vbuckets.
            raise RequestRefused(Status.ETMPFAIL, "the bucket is being opened or closed; try again")
        bucket = self.service.bucket
        if len(config.rows) != len(bucket.vbuckets):
            raise LocalProtocolError(
                f"the config has {len(config.rows)} vbuckets, the bucket has {len(bucket.vbuckets)}",
                hint="Start the node with --vbuckets as the others have it, on an empty data folder",
            )
        known = self.config
        if known is not None and config.version <= known.version and config != known:
            return False
        kept = self.service.settings
        settings = kept if config.settings is None else BucketSettings.decode(config.settings)
        self._set_config(config)
        self._admit_nodes(config)
        if bucket.facts.uuid != config.uuid:
            # A node that joins gives up its own bucket: from now on it has a part of the cluster's.
            bucket.join(config.uuid)
        end_takeovers(self.service, config, self.this_node)
        surplus = apply_config(self.service, config, self.this_node)
        self.service.sync_writes.evaluate_all()
        self.service.set_settings(replace(settings, is_forming=False))
        bucket.put_rows({CLUSTER_CONFIG: config.encode(with_login=True)})
        if config != known:
            self._log_config(config)
            self._note_nodes(known, config)
        self.service.is_waiting = False
        self.service.on_change()
        self._replicate()
        self._remove(surplus)
        self._settings.on_config()
        self.peers.notify()
        return True

    def _admit_nodes(self, config: PublishedConfig) -> None:
        """Accept log-ins of the other nodes while this one is in the cluster."""
        login = None if self.this_node is None else config.login
        if login != self._admitted:
            self._admitted = login
            self._settings.on_login(config.bucket, login)

    def _log_config(self, config: PublishedConfig) -> None:
        this_node = self.this_node
        active = 0 if this_node is None else sum(row[0] == this_node for row in config.rows)
        logger.info(
            "bucket %s: config %d, %d of %d vbuckets are active here",
            *(config.bucket, config.revision, active, len(config.rows)),
            extra=fields(event=LogEvent.CLUSTER_CONFIG, bucket=config.bucket, config=config.revision, vbuckets=active),
        )

    def _note_nodes(self, known: PublishedConfig | None, config: PublishedConfig) -> None:
        has_vbuckets = any(self.this_node in row for row in config.rows)
        before = None if known is None else known.names()
        self.service.history.changed_nodes(before, config.names(), has_vbuckets=has_vbuckets)

    def _replicate(self) -> None:
        if self.config is not None and self._address is not None:
            wanted = replicated(self.service, self.config, self.this_node)
            # Use the name that the config has for this node: it may have opened more ports since.
            name = self._address.kv_address if self.this_node is None else self.config.names()[self.this_node]
            self.replication.follow(self.config, wanted, name=name)

    def _remove(self, surplus: list[int]) -> None:
        if self._removing is not None:
            self._removing.cancel()
        self._removing = asyncio.create_task(self._remove_in_turns(surplus)) if surplus else None

    async def _remove_in_turns(self, surplus: list[int]) -> None:
        service = self.service
        for at in range(0, len(surplus), _REMOVE_TOGETHER):
            together = surplus[at : at + _REMOVE_TOGETHER]

            def remove(together: list[int] = together) -> None:
                there = [vbucket for vbucket in together if service.bucket.vbuckets.exists(vbucket)]
                remove_vbuckets(service.bucket, there)
                service.forget_locks(there)

            await self._loop.at_rest(remove)

    # --- commits --------------------------------------------------------------------------------------------------

    def on_void(self) -> None:
        """A commit could not be written, so vbucket states were reverted: apply the config again."""
        self.replication.on_void()
        if self.config is not None and self._address is not None:
            self.adopt(self.config)

    def on_durable(self) -> None:
        """A commit of the bucket is durable."""
        uid = self.service.bucket.manifest.uid
        if uid != self._manifest_uid:
            self._manifest_uid = uid
            self.peers.notify()
        self.replication.on_durable()


# --- the other nodes ----------------------------------------------------------------------------------------------

TIMEOUTS = Timeouts(connect_s=2.0, answer_s=10.0)
PEER_FEATURES = (*FEATURES, Feature.XATTR, Feature.SNAPPY)
"""With Snappy, values are sent as they are stored."""


async def share_users(memberships: Iterable[ClusterMembership]) -> dict[str, str]:
    """Wait until all other nodes have the users of this one. Returns the nodes that do not have them, and why."""
    nodes = {
        node.kv_address: (membership.peers, node)
        for membership in memberships
        if membership.this_node is not None
        for node in membership.service.other_nodes()
    }
    handed_over = (peers.hand_over_users(node) for peers, node in nodes.values())
    results = await asyncio.gather(*handed_over, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, HeadwaterError):
            raise result
    failures = zip(nodes, results, strict=True)
    return {name: error.reason for name, error in failures if isinstance(error, HeadwaterError)}


def peer_login(
    options: NodeOptions, random_bytes: Callable[[int], bytes]
) -> Callable[[str, Credentials | None], Login]:
    """Return a function for how this node logs in to other nodes: over TLS if it has a certificate."""
    tls = peer_context(options)

    def login(bucket: str, credentials: Credentials | None) -> Login:
        return Login(
            credentials=credentials,
            bucket=bucket,
            tls=tls,
            # Both sides prove that they know the secret without sending it: another program may have the address.
            mechanism=Mechanism.SCRAM_SHA512,
            features=PEER_FEATURES,
            agent="headwater node",
            timeouts=TIMEOUTS,
            random_bytes=random_bytes,
        )

    return login
