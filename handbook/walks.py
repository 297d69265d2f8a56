"""The walks of the architecture page: the source files that one set and one rollback go through.

`python -m handbook.walks` runs a node and a landing in one process, with a profiler in every thread, and prints the
result as JSON. The landing is paused between its batches, so that the recording covers one set (from its bytes at the
listener until its row is in the table `documents`), and then one failover drill (until the landing has undone it).

Two things are not recorded: the thread that sets the document, which is the client, and work that a clock starts,
since it happens with or without a set. Kernels run as machine code, which no profiler sees: the files that call them
represent them.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from deltalake import DeltaTable

from handbook.markdown import code, sentence, table
from headwater.client.cluster_map import vbucket_of
from headwater.client.connection_string import Address
from headwater.client.kv_connection import KvConnection, Login
from headwater.node.node import Node
from headwater.node.node_folder import NodeEnvironment
from headwater.node.options import NodeOptions
from headwater.protocol.messages.documents import Set
from headwater.protocol.numbers import DEFAULT_COLLECTION, Seqno
from headwater.protocol.sasl import Credentials

if TYPE_CHECKING:
    from headwater.landing import LandedBatch

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "headwater"
PAGE = ROOT / "docs" / "internals" / "architecture.md"
RUN_S_MAX = 300
"""A run takes two seconds, or longer if kernels must be compiled first."""
STEP_S_MAX = 60.0

USER, PASSWORD, BUCKET = "admin", "a secret for the walk", "default"
VBUCKETS = 4
KEY = b"order-1"
T = TypeVar("T")

_NODES_CLOCK = "_watch_connections"
"""The node's task that checks its connections periodically."""


# --- the tables -----------------------------------------------------------------------------------------------------


def set_walk() -> str:
    return _walk_table("walk of a set", traced()["set"])


def rollback_walk() -> str:
    return _walk_table("walk of a rollback", traced()["rollback"])


@cache
def traced() -> dict[str, list[str]]:
    """Return the files entered in each walk, in order of first entry. A rollback has only those not in the set's."""
    ran = subprocess.run(
        [sys.executable, "-m", "handbook.walks"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE.parent), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        timeout=RUN_S_MAX,
        check=True,
    )
    found: dict[str, list[str]] = json.loads(ran.stdout)
    return found


def _walk_table(name: str, found: list[str]) -> str:
    # Threads run concurrently, so the order varies between runs. Keep the page's order if it has the same files.
    before = files_on_page(name)
    files = before if {*before} == {*found} else found
    rows = [(code(file), first_sentence(SOURCE / file)) for file in files]
    return f"{len(files)} files.\n\n" + table(("file", "what it is"), rows)


def files_on_page(name: str) -> list[str]:
    """Return the files that the page lists in one of its walks."""
    place = PAGE.read_text(encoding="utf-8").partition(f"<!-- made: {name} -->")[2].partition("<!-- /made -->")[0]
    return re.findall(r"^\| `([\w/]+\.py)` \|", place, re.M)


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    said = sentence(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))))
    return re.split(r"(?<=\.) ", said, maxsplit=1)[0].removesuffix(".")


# --- the run that is traced -----------------------------------------------------------------------------------------


class Recorder:
    """Records the source files that are entered, in threads started after `install`."""

    def __init__(self) -> None:
        self._found: list[str] | None = None

    def install(self) -> None:
        threading.setprofile(self._on_event)

    def begin(self) -> None:
        self._found = []

    def end(self) -> list[str]:
        found, self._found = self._found, None
        assert found is not None, "nothing is recorded"
        return found

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        found = self._found
        if found is None or event != "call" or not frame.f_code.co_filename.startswith(f"{SOURCE}/"):
            return
        file = frame.f_code.co_filename.removeprefix(f"{SOURCE}/")
        if file not in found and not _is_of_clock(frame):
            found.append(file)


def _is_of_clock(frame: FrameType | None) -> bool:
    if threading.current_thread().name.endswith(": lag"):
        return True
    while frame is not None:
        if frame.f_code.co_name == _NODES_CLOCK:
            return True
        frame = frame.f_back
    return False


class Walk:
    """A node, a client, and a landing that is paused after each of its batches."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._recorder = Recorder()
        self._has_landed, self._may_go_on = threading.Semaphore(0), threading.Semaphore(0)
        self._batches: list[LandedBatch] = []

    def run(self) -> dict[str, list[str]]:
        """Return the two walks."""
        from headwater.landing import Freshness, LocalRunner, land, query

        query.LAG_EVERY_S = STEP_S_MAX  # The thread that measures the lag runs once, while nothing is recorded.
        self._recorder.install()
        self._serve()
        self._set(KEY, b"{}")
        land(
            f"{self._url}/{BUCKET}",
            str(self._folder / "lake"),
            every=0.01,
            fresh=Freshness(merge_share=1, write_ratio=1e9),
            on_batch=self._on_batch,
            runner=LocalRunner(1),
            user=USER,
            password=PASSWORD,
        )
        self._wait_for_batch()
        # Twice: the first set loads the kernels for setting an existing document.
        self._record(lambda: self._set(KEY, b'{"n":0}'))
        of_set = self._record(lambda: self._set(KEY, b'{"n":1}'))
        last = self._batches[-1]
        assert (last.rows, last.merges, self._document()) == (1, 1, '{"n":1}'), last
        vbucket = vbucket_of(KEY, VBUCKETS)
        kept = last.offsets[vbucket].seqno - 1
        of_rollback = self._record(lambda: self._on_node(self._node.roll_back(BUCKET, vbucket, Seqno(kept))))
        assert self._batches[-1].rollbacks == {vbucket: kept}, self._batches[-1]
        assert self._document() == '{"n":0}'
        return {"set": of_set, "rollback": [file for file in of_rollback if file not in of_set]}

    def _serve(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="node", daemon=True).start()
        options = NodeOptions(data=self._folder / "node", port=0, vbuckets=VBUCKETS, user=USER, password=PASSWORD)
        self._node = Node(options, NodeEnvironment(serves_http=False))
        self._url = self._on_node(self._node.start()).url
        address = Address("127.0.0.1", int(self._url.rpartition(":")[2]))
        self._client = KvConnection.open(address, Login(credentials=Credentials(USER, PASSWORD), bucket=BUCKET))

    def _on_node(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(STEP_S_MAX)

    def _set(self, key: bytes, value: bytes) -> None:
        self._client.request(
            Set(key=key, value=value, vbucket=vbucket_of(key, VBUCKETS), collection_id=DEFAULT_COLLECTION)
        )

    def _document(self) -> str:
        (row,) = DeltaTable(self._folder / "lake" / "documents" / "_default._default").to_pyarrow_table().to_pylist()
        return str(row["document"])

    # --- the landing and its pauses -----------------------------------------------------------------------------------

    def _on_batch(self, landed: LandedBatch) -> None:
        """Note a committed and merged batch. The landing's thread calls this, and waits here."""
        self._batches.append(landed)
        self._has_landed.release()
        self._may_go_on.acquire()

    def _wait_for_batch(self) -> None:
        assert self._has_landed.acquire(timeout=STEP_S_MAX), "the landing has not landed a batch"

    def _record(self, act: Callable[[], object]) -> list[str]:
        """Change the bucket, wait until the change has landed, and return the files entered in the meantime."""
        self._recorder.begin()
        act()
        self._may_go_on.release()
        self._wait_for_batch()
        return self._recorder.end()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="headwater-walk-") as folder:
        print(json.dumps(Walk(Path(folder)).run()), flush=True)
    # The landing still waits for its next batch, and the node for its next client.
    os._exit(0)


if __name__ == "__main__":
    main()
