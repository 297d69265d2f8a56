"""The backup that the guide describes, done by its very commands, and what consumers see after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.client.changes import Mutation, Rollback
from headwater.client.offsets import Offsets
from headwater.testing.cluster import HeadwaterCluster
from headwater.testing.node import HeadwaterNode
from headwater.testing.nursery import Nursery
from support.cases import case_apart
from support.doc_blocks import ROOT, Block, blocks_of, run_bash

KEY = "fox"


@pytest.fixture
def node(nursery: Nursery, tmp_path: Path) -> Iterator[HeadwaterNode]:
    (tmp_path / "node").mkdir()
    with HeadwaterNode(nursery, tmp_path / "node") as started:
        yield started
        assert "Traceback" not in started.log


class Consumer:
    """Keeps the changes by seqno, and its place, as the guide to consumers has it."""

    def __init__(self) -> None:
        self.changes: dict[tuple[int, int], Any] = {}
        self.rollbacks = 0
        self._place: Offsets | None = None

    def read(self, server: HeadwaterNode | HeadwaterCluster) -> dict[str, Any]:
        """Go on to what is there now. Gives the documents that it then holds."""
        with server.connect() as client:
            reading = client.changes(start=self._place or "beginning", end="now")
            for change in reading:
                if isinstance(change, Rollback):
                    self.rollbacks += 1
                    for vbucket, seqno in list(self.changes):
                        if vbucket == change.vbucket and seqno > change.seqno:
                            del self.changes[vbucket, seqno]
                else:
                    self.changes[change.vbucket, change.seqno] = change
            self._place = reading.offsets
        newest = {change.key: change for _, change in sorted(self.changes.items(), key=lambda item: item[0])}
        return {key: change.json() for key, change in newest.items() if isinstance(change, Mutation)}


def bucket_of(server: HeadwaterNode | HeadwaterCluster) -> dict[str, Any]:
    """The documents, as somebody sees them who has never read before."""
    return Consumer().read(server)


# --- the page's commands ------------------------------------------------------------------------------------------


def command(wanted: str, folder: Path, node: str = "node") -> tuple[Block, str]:
    """A block of the page by how it begins, with its folders below `folder`."""
    named = f"not run: {Path(__file__).relative_to(ROOT)} "
    found = [block for block in blocks_of(ROOT / "docs" / "guides" / "backup.md") if block.need.startswith(named)]
    [block] = [block for block in found if block.code.startswith(wanted)]
    code = block.code.replace("/var/lib/headwater", str(folder / node / "data"))
    return block, code.replace("/backup/headwater", str(folder / f"backup-of-{node}"))


def back_up(folder: Path, node: str = "node") -> None:
    run_bash(*command("cp -a", folder, node), folder)


def restore(folder: Path, node: str = "node") -> None:
    run_bash(*command("rm -r", folder, node), folder)


def copy_over(folder: Path) -> None:
    """What people do instead: the old files stay, and get the copy's contents."""
    block, _ = command("rm -r", folder)
    run_bash(block, f"cp -a {folder}/backup-of-node/. {folder}/node/data/", folder)


# --- what follows -------------------------------------------------------------------------------------------------


@case_apart(restore, False, id="restored")
@case_apart(copy_over, False, id="copied over")
@case_apart(restore, True, id="restored to before a crash")
def test_consumers_roll_back_what_the_copy_does_not_have(
    node: HeadwaterNode, tmp_path: Path, bring_back: Callable[[Path], None], crashes: bool
) -> None:
    node.write({KEY: "before"})
    ahead, behind = Consumer(), Consumer()
    assert ahead.read(node) == behind.read(node) == {KEY: "before"}
    node.stop()
    back_up(tmp_path)
    node.start()
    if crashes:
        # The consumer will be on a branch that the copy has never heard of.
        node.kill()
        node.start()
    # Three seqnos that the copy does not have, and that the consumer has.
    for value in ("lost", "lost, too", "lost as well"):
        node.write({KEY: value})
        assert ahead.read(node) == {KEY: value}
    assert (ahead.rollbacks, behind.rollbacks) == (0, 0)
    node.stop()
    bring_back(tmp_path)
    node.start()
    # The restored node gives the same seqnos to other changes, and goes beyond where the consumer was.
    for number in range(5):
        node.write({KEY: number})
    assert ahead.read(node) == bucket_of(node) == {KEY: 4}
    kept = [change.json() for change in ahead.changes.values()]
    assert not any("lost" in str(value) for value in kept)
    assert ahead.rollbacks == 1
    assert behind.read(node) == {KEY: 4}
    assert behind.rollbacks == 0, "it had nothing that the copy does not have"
    assert "or is a copy" in node.log


def test_a_cluster_is_restored_as_a_whole(nursery: Nursery, tmp_path: Path) -> None:
    keys = [f"key {number}" for number in range(8)]
    with HeadwaterCluster(nursery, tmp_path) as cluster:

        def write(value: Any) -> None:
            cluster.write(dict.fromkeys(keys, value))

        def while_stopped(do: Callable[[Path, str], None]) -> None:
            for node in cluster.nodes:
                node.stop()
            for number in range(len(cluster.nodes)):
                do(tmp_path, f"node-{number}")
            for node in cluster.nodes:
                node.start()

        write("before")
        consumer = Consumer()
        consumer.read(cluster)
        while_stopped(back_up)
        for value in ("lost", "lost, too"):
            write(value)
            assert consumer.read(cluster) == dict.fromkeys(keys, value)
        assert consumer.rollbacks == 0
        while_stopped(restore)
        for number in range(4):
            write(number)
        assert consumer.read(cluster) == bucket_of(cluster) == dict.fromkeys(keys, 3)
        assert consumer.rollbacks == len({node.vbucket_of(key) for key in keys for node in cluster.nodes})
        # The replicas went back, too, and have gone on with the others since.
        cluster.wait_until_replicated()
        cluster.failover()
        assert consumer.read(cluster) == bucket_of(cluster) == dict.fromkeys(keys, 3)


def test_the_backup_itself_is_seen_by_nobody(node: HeadwaterNode, tmp_path: Path) -> None:
    node.write({KEY: 1})
    consumer = Consumer()
    consumer.read(node)
    before = branches(node)
    node.stop()
    back_up(tmp_path)
    node.start()
    assert branches(node) == before
    assert consumer.read(node)[KEY] == 1
    assert consumer.rollbacks == 0
    assert "or is a copy" not in node.log


def test_without_its_owner_the_data_is_taken_for_a_copy(node: HeadwaterNode, tmp_path: Path) -> None:
    """What the page advises where a whole disk went back."""
    before = branches(node)
    node.stop()
    (tmp_path / "node" / "data" / "buckets" / "default" / "owner").unlink()
    node.start()
    after = branches(node)
    assert all(after[vbucket] != vbuuid for vbucket, vbuuid in before.items())


def branches(node: HeadwaterNode) -> dict[int, int]:
    """The newest vbuuid of every vbucket that has something, by what a read is told."""
    node.write({f"key {number}": number for number in range(64)})
    with node.connect() as client:
        reading = client.changes(end="now", no_value=True)
        for _ in reading:
            pass
        return {int(vbucket): int(offset.vbuuid) for vbucket, offset in reading.offsets.offsets.items()}
