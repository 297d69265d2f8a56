"""What can't work is told in one sentence with what to do, before Spark is started, and no table is touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from headwater.cli import main
from support.driven_source import SimulatedLanding
from support.fault_proxy import free_port
from support.landings import SourceBucket, run_headwater
from support.node_process import PASSWORD, USER


@dataclass(frozen=True)
class Told:
    code: int
    out: str
    err: str


def headwater(*arguments: str, password: str = PASSWORD) -> Told:
    """The command, in this process: it takes seconds to import what it needs. There is no Java for it, so that Spark
    can't be started."""
    done = CliRunner().invoke(main, arguments, env=_environment(password))
    return Told(done.exit_code, done.stdout, done.stderr)


def headwater_process(*arguments: str, password: str = PASSWORD) -> Told:
    """The same, in a process of its own."""
    done = run_headwater(*arguments, **_environment(password))
    return Told(done.returncode, done.stdout, done.stderr)


def _environment(password: str) -> dict[str, str]:
    return {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": password, "COLUMNS": "400", "JAVA_HOME": "/nowhere"}


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def landed(bucket: SourceBucket, tmp_path: Path) -> SimulatedLanding:
    """With tables in it."""
    landed = SimulatedLanding(bucket, tmp_path / "lake")
    bucket.put([b"a", b"b"], b'{"n":1}')
    landed.land()
    return landed


def refused(
    landed: SimulatedLanding, *arguments: str, password: str = PASSWORD, run: Callable[..., Told] = headwater
) -> str:
    """What `headwater land` says against it, which is all that it does."""
    before = content(landed.folder.parent)
    told = run("land", *arguments, "--once", password=password)
    assert (told.code, told.out) == (1, "")
    assert told.err.startswith("Error: ")
    assert told.err.count("\n") == 1
    assert content(landed.folder.parent) == before
    return told.err.removeprefix("Error: ").strip()


def test_wrong_credentials(landed: SimulatedLanding) -> None:
    arguments = (landed.bucket.url, "--into", str(landed.folder))
    told = refused(landed, *arguments, password="not this one", run=headwater_process)
    assert "the user or the password is wrong. Check the user name and the password" in told
    assert "not this one" not in told


def test_an_unreachable_node(landed: SimulatedLanding) -> None:
    told = refused(landed, f"couchbase://127.0.0.1:{free_port()}/default", "--into", str(landed.folder))
    assert "can't be reached: Connection refused. Check the address, and that the server is running" in told


def test_an_unknown_collection(landed: SimulatedLanding) -> None:
    told = refused(
        landed, landed.bucket.url, "--into", str(landed.folder.with_name("new")), "--collection", "_default.hotels"
    )
    assert told == 'collection "_default.hotels" is unknown. Did you mean "_default._default"?'


def test_the_tables_of_another_bucket(landed: SimulatedLanding, other_bucket: SourceBucket) -> None:
    told = refused(landed, other_bucket.url, "--into", str(landed.folder))
    assert told.startswith(f"the tables in {landed.folder} hold the bucket {landed.bucket.name} at ")
    assert "Give another directory, or the bucket that was landed here" in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--columns", "n INT"), "has the typed columns inferred n BIGINT, not n INT"),
        (("--columns", "n NUMBER"), "NUMBER is not a type of a JSON field"),
        (("--no-columns",), "has the typed columns inferred n BIGINT, not none"),
        (("--no-columns", "--columns", "n INT"), "--no-columns and --columns for all tables contradict each other"),
        (("--xattrs",), "were made without extended attributes. Use xattrs as before"),
        (("--groups", "5"), "have 2 groups. Omit the number of groups"),
    ],
    ids=["other columns", "no type", "no columns", "both", "xattrs", "groups"],
)
def test_other_columns_than_before(landed: SimulatedLanding, options: tuple[str, ...], told: str) -> None:
    assert told in refused(landed, landed.bucket.url, "--into", str(landed.folder), *options)


def _with_other_files(folder: Path) -> Path:
    (folder / "photos").mkdir(parents=True)
    return folder


def _as_a_file(folder: Path) -> Path:
    folder.write_text("a file")
    return folder


def _in_a_file(folder: Path) -> Path:
    folder.write_text("a file")
    return folder / "lake"


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (_with_other_files, "holds 'photos' and no tables of a bucket. Give an empty or a new directory"),
        (_as_a_file, "can't be used: "),
        (_in_a_file, "can't be created: "),
        (lambda folder: Path("/proc/headwater"), "can't be created: "),
    ],
    ids=["other files", "a file", "in a file", "nowhere"],
)
def test_a_directory_that_can_t_be_used(landed: SimulatedLanding, place: Callable[[Path], Path], told: str) -> None:
    into = place(landed.folder.with_name("other"))
    assert told in refused(landed, landed.bucket.url, "--into", str(into))


def test_verify_without_tables(landed: SimulatedLanding) -> None:
    told = headwater("verify", landed.bucket.url, str(landed.folder.with_name("other")))
    assert told.code == 1
    assert told.err.endswith("does not contain the tables of a landing. Give the directory of a landing\n")


def test_verify_counts_what_is_newer_as_pending(landed: SimulatedLanding) -> None:
    bucket = landed.bucket
    for pending, said in (
        (0, "2 documents in 1 collection"),
        (1, "1 document in 1 collection; 1 newer change is pending"),
    ):
        told = headwater("verify", bucket.url, str(landed.folder))
        assert (told.code, told.err) == (0, "")
        assert told.out.splitlines()[-1] == f"Equal: {said}."
        assert [cell.strip() for cell in told.out.splitlines()[3].strip("│").split("│")] == [
            "_default._default", str(2 - pending), str(pending), "0"
        ]  # fmt: skip
        bucket.put([b"a"], b'{"n":2}')


def test_without_java(landed: SimulatedLanding) -> None:
    told = headwater_process("land", landed.bucket.url, "--into", str(landed.folder), "--once")
    assert told == Told(1, "", "Error: Spark needs Java, and none was found. Install Java 17, or set JAVA_HOME\n")
