"""What users import: six modules, and nothing that README, docs, examples and demo need lies elsewhere."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cases import each
from support.doc_blocks import PAGES, ROOT

PUBLIC = {
    "headwater": (
        "CHANGE_SCHEMA Batches Change Changes CheckpointStore Client ClientSettings CollectionCreated CollectionDropped"
        " CollectionModified ConnectKeywords Deletion DocumentChange End Expiration FileCheckpoint HeadwaterError"
        " LeaseGroup Mechanism Membership Mutation Network Offsets ReadKeywords ReaderMetrics Rollback ScopeCreated"
        " ScopeDropped Snapshots SqliteCheckpoint Start StaticMember StreamOffset Surveyor Timeouts TlsSettings"
        " XattrCheckpoint __version__ blocking change_schema connect errors register_metrics unregister_metrics"
        " vbucket_of"
    ),
    "headwater.blocking": "Batches Changes Client connect",
    "headwater.spark": (
        "ChangeBatch FrameKeywords Freshness IcebergSettings LagListener LakeLook LakeSettings LandedBatch"
        " LandingQuery LandingStatus MergeRules SourceKeywords TypedColumns Upkeep Verification apply_changes documents"
        " land look query_error read register start_session verify"
    ),
    "headwater.landing": (
        "Freshness IcebergSettings JobRunner LakeLook LakeSettings LandedBatch LandingQuery LandingStatus LocalRunner"
        " MergeRules SourceKeywords TypedColumns Upkeep Verification documents land look verify"
    ),
    "headwater.testing": "HeadwaterCluster HeadwaterNode NodeFailed",
    "headwater.protocol": (
        "NOTHING_NEGOTIATED WITH_COLLECTIONS Abort AddStream AddStreamResponse BufferAck CacheItem CacheTransfer"
        " CacheTransferEnd CloseStream ClustermapChangeNotification CollectionId Commit ConsumerPoint Control"
        " DcpFlush DcpNoop Deletion ErrorResponse Expiration FailoverEntry FailoverLog Feature Flush FlushQuiet"
        " Frame FrameBuffer GetClusterConfig GetErrorMap GetFailoverLog GetFailoverLogResponse Hello HelloResponse"
        " Magic Message Mutation Negotiated Noop Opcode Open OpenFlags OsoFlags OsoSnapshot PlainResponse Prepare"
        " Quit QuitQuiet RemoteProtocolError Request Response SaslAuth SaslListMechanisms SaslStep ScopeId"
        " SelectBucket Seqno SeqnoAcknowledged SeqnoAdvanced SetClusterConfig SetVBucketState SnapshotFlags"
        " SnapshotMarker SnapshotTracker Stat Status StreamEnd StreamEndReason StreamFlags StreamOffset"
        " StreamRequest StreamRequestResponse SystemEvent SystemEventId VBucketId VBucketState Vbuuid Verbosity"
        " Version decide_rollback decode_frames decode_message"
    ),
}
LAZY = sorted(PUBLIC.keys() - {"headwater.blocking"})
PROGRAMS = [path for folder in ("examples", "demo") for path in sorted((ROOT / folder).rglob("*.py"))]
READ_BY_USERS = [page for page in PAGES if "internals" not in page.parts]
_PYTHON = re.compile(r"^```python[^\n]*\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
_HEAVY = ("numpy", "pyarrow", "numba", "pyspark", "prometheus_client", "asyncio")


@pytest.mark.parametrize("name", PUBLIC)
def test_what_a_module_exports(name: str) -> None:
    module = importlib.import_module(name)
    assert sorted(module.__all__) == sorted(PUBLIC[name].split())
    assert [one for one in module.__all__ if not hasattr(module, one)] == []


@pytest.mark.parametrize("name", LAZY)
def test_completion_offers_what_is_public(name: str) -> None:
    modules = {other.removeprefix("headwater.") for other in PUBLIC} if name == "headwater" else set()
    assert {*dir(importlib.import_module(name))} == {*PUBLIC[name].split(), *modules} - {"headwater"}


@pytest.mark.parametrize("name", PUBLIC)
def test_nothing_else_can_be_asked_for(name: str) -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        importlib.import_module(name).nothing  # noqa: B018


@pytest.mark.parametrize("name", LAZY)
def test_checkers_see_what_is_loaded_lazily(name: str) -> None:
    """The imports that only a type checker follows are those by which a name is found when the program runs."""
    module = importlib.import_module(name)
    assert module.__file__ is not None
    followed: set[str] = set()
    for statement in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            for one in statement.body:
                home = importlib.import_module(str(one.module))
                for alias in one.names:
                    if alias.name in module.__all__:
                        assert getattr(home, alias.name) is getattr(module, alias.name), alias.name
                        followed.add(alias.name)
    assert followed >= {loaded for loaded in module.__all__ if loaded not in vars(module)}


@pytest.mark.parametrize("name", LAZY)
def test_an_import_is_light(name: str) -> None:
    program = f"import sys, {name}; print([one for one in {_HEAVY} if one in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


# --- what pages and programs import -------------------------------------------------------------------------------


def imported(code: str) -> Iterator[tuple[str, str]]:
    """Modules of ours, and what is taken from each."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "headwater":
            yield from ((str(node.module), alias.name) for alias in node.names)
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.partition(".")[0] == "headwater")


def not_public(code: str) -> list[str]:
    return [
        f"{module}: {name}"
        for module, name in imported(code)
        if module not in PUBLIC or (name and name not in PUBLIC[module].split() and f"{module}.{name}" not in PUBLIC)
    ]


def blocks(page: Path) -> Iterator[str]:
    """The Python of a page, and the programs that it holds as texts."""
    for match in _PYTHON.finditer(page.read_text(encoding="utf-8")):
        yield match["code"]
        for node in ast.walk(ast.parse(match["code"])):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "headwater" in node.value:
                yield node.value if "\nfrom headwater" in node.value else ""


@each("path", PROGRAMS)
def test_a_program_imports_what_is_public(path: Path) -> None:
    assert not_public(path.read_text(encoding="utf-8")) == []


@each("page", READ_BY_USERS)
def test_a_page_imports_what_is_public(page: Path) -> None:
    assert [fault for code in blocks(page) for fault in not_public(code)] == []


@each("page", READ_BY_USERS)
def test_a_page_names_modules_that_are_public(page: Path) -> None:
    named = re.findall(r"`(headwater\.(?:client|lake|node|store|transfer)\.[\w.]+)`", page.read_text(encoding="utf-8"))
    assert named == []


def test_what_is_not_public_is_found() -> None:
    assert not_public("from headwater.client.offsets import Offsets") == ["headwater.client.offsets: Offsets"]
    assert not_public("from headwater import nothing, Offsets") == ["headwater: nothing"]
    assert not_public("import headwater.store") == ["headwater.store: "]
    assert not_public("import headwater.spark\nfrom headwater import spark, protocol\nimport os") == []
