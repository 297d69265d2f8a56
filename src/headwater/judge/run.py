"""One run: a cluster of real nodes on loopback, a consumer, the steps of the plan, and the verdict."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from headwater.client.bucket_kv import BucketKv
from headwater.client.kv_connection import KvConnection, Login
from headwater.client.settings import ClientSettings
from headwater.client.threads import LoopThread
from headwater.errors import KeyNotFound, StatusError
from headwater.judge.consumer import Consumer, ConsumerLog, Difference, Held, differences
from headwater.judge.plan import CLOSING, PROBE, Plan, Step, Write
from headwater.phrases import counted
from headwater.protocol.features import VBucketState
from headwater.protocol.messages import Request, Response
from headwater.protocol.messages.documents import Delete, Get, GetResponse, Set, StoreResponse
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos
from headwater.protocol.numbers import CollectionId, vbucket_of
from headwater.protocol.sasl import Credentials
from headwater.testing.cluster import HeadwaterCluster
from headwater.testing.nursery import Nursery

START_S_MAX = 60.0
"""How long to wait for the consumer's first line: a virtual machine may have to warm up."""
SEEN_S_MAX = 3.0
"""How long a step waits for the consumer to see its writes."""
QUIET_S = 0.5
"""A consumer that has everything and has been silent for this long is finished."""
LOOK_EVERY_S = 0.02
WAITS_MAX = 6
"""The end may last at most this many times the patience, even if the consumer keeps writing."""
BUCKET = "default"
_JSON_FLAGS = 0x02000000


class Outcome(StrEnum):
    EQUAL = "equal"
    DIFFERS = "differs"
    STUCK = "stuck"
    """It did not reach the end of every vbucket."""
    CRASHED = "crashed"
    """It has exited, or its output can't be parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    seed: int
    outcome: Outcome
    reason: str = ""
    first: Difference | None = None
    differing: int = 0
    before: str = ""
    """The fault that best explains the first difference."""
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        return {Outcome.EQUAL: 0, Outcome.DIFFERS: 1}.get(self.outcome, 3)

    def lines(self) -> list[str]:
        lines = [f"seed {self.seed}: {self.outcome}{f', {self.reason}' if self.reason else ''}"]
        if self.first is not None:
            lines.append(f"  first of {counted(self.differing, 'difference')}: {self.first}")
            lines.append(f"  the fault before: {self.before}")
        return lines


@dataclass(slots=True)
class _Diary:
    """A record of the writes and faults."""

    seqnos: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The step and the seqno of each write, by the write's number."""
    faults: list[tuple[int, str, Mapping[int, int]]] = field(default_factory=list)
    """The step, what was done, and for each vbucket that lost changes the seqno to which it went back."""

    def fault_before(self, first: Difference) -> str:
        """Return the fault that took back the consumer's version, or else the last before the right version's write."""
        found, expected = self._written(first.found), self._written(first.expected)
        if found is not None:
            for step, what, kept in self.faults:
                if step >= found[0] and kept.get(first.vbucket, found[1]) < found[1]:
                    return f"step {step}, {what}, which took back the consumer's version (seqno {found[1]})"
        earlier = [fault for fault in self.faults if expected is None or fault[0] <= expected[0]] or self.faults
        touching = [fault for fault in earlier if first.vbucket in fault[2]] or earlier
        return f"step {touching[-1][0]}, {touching[-1][1]}" if touching else "none"

    def _written(self, held: Held | None) -> tuple[int, int] | None:
        number = held.value.get("write") if held is not None and isinstance(held.value, dict) else None
        return self.seqnos.get(number) if isinstance(number, int) else None


def judge_seed(
    nursery: Nursery,
    folder: Path,
    plan: Plan,
    command: Sequence[str],
    *,
    patience_s: float,
    report: Callable[[str], object] = lambda line: None,
) -> Verdict:
    """Run the consumer against the cluster of a plan, and compare its documents with the bucket."""
    began_s = time.monotonic()
    with ExitStack() as stack:
        verdict = _Run(stack, nursery, folder, plan, patience_s, report).judge(command)
    return replace(verdict, seconds=round(time.monotonic() - began_s, 2))


class _Run:
    def __init__(
        self,
        stack: ExitStack,
        nursery: Nursery,
        folder: Path,
        plan: Plan,
        patience_s: float,
        report: Callable[[str], object],
    ) -> None:
        self._stack = stack
        self._folder = folder
        self._plan = plan
        self._patience_s = patience_s
        self._report = report
        shape = plan.shape
        self._cluster = stack.enter_context(
            HeadwaterCluster(nursery, folder, nodes=shape.nodes, replicas=1, vbuckets=shape.vbuckets)
        )
        self._addresses = [str(node.address) for node in self._cluster.nodes]
        self._thread = LoopThread("headwater-judge")
        stack.callback(self._thread.close)
        user, password = self._cluster.user, self._cluster.password
        self._login = Login(credentials=Credentials(user, password), bucket=BUCKET)
        self._kv = BucketKv(ClientSettings.make(self._cluster.url, user=user, password=password))
        stack.callback(lambda: self._thread.run(self._kv.close))
        self._diary = _Diary()
        self._at = 0
        """The number of the current step."""

    def judge(self, command: Sequence[str]) -> Verdict:
        plan = self._plan
        self._write(plan.first)
        consumer = self._stack.enter_context(Consumer(command, self._environment(), self._folder, plan.shape.vbuckets))
        self._wait(consumer, lambda: consumer.has_spoken, START_S_MAX)
        for number, step in enumerate(plan.steps, start=1):
            self._at = number
            if consumer.complaint() is not None:
                break
            self._report(f"step {number}: {step}")
            self._do(step, consumer)
        truth = self._truth()
        return self._verdict(consumer, truth)

    def _environment(self) -> dict[str, str]:
        state = self._folder / "state"
        state.mkdir()
        connection = f"couchbase://{','.join(self._addresses)}"
        return {
            "HEADWATER_CONNECTION": connection,
            "HEADWATER_BUCKET": BUCKET,
            "HEADWATER_URL": f"{connection}/{BUCKET}",
            "HEADWATER_HTTP": self._cluster.nodes[0].http_url,
            "HEADWATER_USER": self._cluster.user,
            "HEADWATER_PASSWORD": self._cluster.password,
            "HEADWATER_STATE": str(state),
        }

    def _wait(self, consumer: Consumer, is_reached: Callable[[], bool], within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        while not is_reached() and time.monotonic() < deadline_s and consumer.complaint() is None:
            time.sleep(LOOK_EVERY_S)

    # --- documents ------------------------------------------------------------------------------------------------

    def _request(self, requests: Sequence[Request]) -> list[Response | StatusError]:
        return self._thread.run(partial(self._kv.request, requests))

    def _write(self, writes: Sequence[Write]) -> None:
        requests = [_request_of(write, self._plan.shape.vbuckets) for write in writes]
        for write, answer in zip(writes, self._request(requests), strict=True):
            if isinstance(answer, StoreResponse) and answer.seqno is not None:
                self._diary.seqnos[write.number] = (self._at, int(answer.seqno))
            elif not isinstance(answer, KeyNotFound):  # For a deletion.
                assert isinstance(answer, StatusError)
                raise answer

    def _truth(self) -> dict[str, Held]:
        """Return the documents of the bucket, read key by key."""
        keys = list(self._plan.keys())
        vbuckets = self._plan.shape.vbuckets
        requests = [
            Get(vbucket=vbucket_of(key.encode(), vbuckets), collection_id=CollectionId(0), key=key.encode())
            for key in keys
        ]
        truth: dict[str, Held] = {}
        for key, answer in zip(keys, self._request(requests), strict=True):
            if isinstance(answer, GetResponse):
                value = json.loads(answer.value)
                truth[key] = Held(self._diary.seqnos[value["write"]][1], value, int(answer.cas))
            elif not isinstance(answer, KeyNotFound):
                assert isinstance(answer, StatusError)
                raise answer
        return truth

    def _high_seqnos(self) -> dict[int, int]:
        """Return the high seqnos of the active vbuckets, as the nodes report them."""
        high: dict[int, int] = {}
        for node in self._cluster.nodes:
            if node.process.is_running:
                with KvConnection.open(node.address, self._login) as connection:
                    answer: Any = connection.request(GetAllVbSeqnos(state=VBucketState.ACTIVE))
                high |= {int(entry.vbucket): int(entry.seqno) for entry in answer.seqnos}
        return high

    # --- steps ----------------------------------------------------------------------------------------------------

    def _do(self, step: Step, consumer: Consumer) -> None:
        cluster, node = self._cluster, self._cluster.nodes[step.node]
        others = [other for other in cluster.nodes if other is not node and other.process.is_running]
        if step.action == "fail over":
            cluster.wait_until_replicated()
            for other in others:
                other.hold_replicas()
        self._write(step.writes)
        before, kept = self._high_seqnos(), dict[int, int]()
        if step.waits:
            self._wait(consumer, lambda: _has_reached(consumer, before), SEEN_S_MAX)
        match step.action:
            case "roll back":
                to = max(0, before[step.vbucket] - step.back)
                kept = {step.vbucket: cluster.rollback(step.vbucket, to)}
            case "fail over":
                cluster.failover(node)
                for other in others:
                    other.release_replicas()
                kept = self._high_seqnos()
            case "bring back":
                cluster.bring_back(node)
            case "move":
                cluster.take_out(node)
            case "cut":
                node.cut_connections()
            case "kill":
                node.kill()
                node.start()
            case "restart":
                consumer.restart()
            case "silence":
                node.pause()
                time.sleep(step.pause_s)
                node.resume()
        if step.action != "write":
            lost = {vbucket: seqno for vbucket, seqno in kept.items() if seqno < before[vbucket]}
            self._diary.faults.append((self._at, step.fault, lost))
        self._write(step.after)
        if step.action != "silence":
            time.sleep(step.pause_s)

    # --- the end --------------------------------------------------------------------------------------------------

    def _verdict(self, consumer: Consumer, truth: Mapping[str, Held]) -> Verdict:
        vbuckets = self._plan.shape.vbuckets
        last = {key: held for key, held in truth.items() if key.startswith(CLOSING)}

        def has_finished() -> bool:
            if consumer.silent_s < QUIET_S:
                return False
            # No change follows a vbucket's closing document.
            found = consumer.documents()
            return bool(last) and all(key in found and held.equals(found[key]) for key, held in last.items())

        def is_over() -> bool:
            return has_finished() or consumer.silent_s > self._patience_s

        self._wait(consumer, is_over, WAITS_MAX * self._patience_s)
        is_done = has_finished()
        if not is_done and consumer.complaint() is None:
            self._write(self._plan.probes)
            high = self._high_seqnos()
            self._wait(consumer, lambda: _has_reached(consumer, high), self._patience_s)
        complaint = None if is_done else consumer.complaint()
        found = {key: held for key, held in consumer.documents().items() if not key.startswith(PROBE)}
        differing = list(differences(truth, found, vbuckets))
        highest = {int(vbucket_of(key.encode(), vbuckets)): held.seqno for key, held in last.items()}
        behind = [vb for vb, seqno in enumerate(consumer.look(ConsumerLog.reached)) if seqno < highest.get(vb, 0)]
        if complaint is not None or not consumer.has_spoken:
            outcome = Outcome.STUCK if complaint is None else Outcome.CRASHED
            reason = complaint or "the consumer has written no line that the judge knows"
            # No verdict on documents: all of them would be missing.
            differing = []
        elif differing and all(difference.vbucket in behind for difference in differing):
            outcome = Outcome.STUCK
            reason = f"the consumer has not come to the end of {_listed(behind)}"
        else:
            outcome, reason = (Outcome.DIFFERS if differing else Outcome.EQUAL), ""
        return Verdict(
            seed=self._plan.seed,
            outcome=outcome,
            reason=reason,
            first=differing[0] if differing else None,
            differing=len(differing),
            before=self._diary.fault_before(differing[0]) if differing else "",
            counts={
                "documents": len(truth),
                "writes": len(self._diary.seqnos),
                "faults": len(self._diary.faults),
                "vbuckets_rolled_back": sum(len(kept) for _, _, kept in self._diary.faults),
                "lines": consumer.look(lambda log: log.lines),
                "rollbacks": consumer.look(lambda log: log.rollbacks),
                "lines_passed_over": consumer.look(lambda log: log.passed_over),
            },
        )


def _request_of(write: Write, vbuckets: int) -> Request:
    key = write.key.encode()
    vbucket, collection = vbucket_of(key, vbuckets), CollectionId(0)
    if write.value is None:
        return Delete(vbucket=vbucket, collection_id=collection, key=key)
    value = json.dumps(write.value, separators=(",", ":")).encode()
    return Set(vbucket=vbucket, collection_id=collection, key=key, value=value, flags=_JSON_FLAGS)


def _has_reached(consumer: Consumer, seqnos: Mapping[int, int]) -> bool:
    reached = consumer.look(ConsumerLog.reached)
    return all(reached[vbucket] >= seqno for vbucket, seqno in seqnos.items())


def _listed(vbuckets: Sequence[int]) -> str:
    return f"{counted(len(vbuckets), 'vbucket')} ({', '.join(map(str, vbuckets[:8]))}{', …' if vbuckets[8:] else ''})"
