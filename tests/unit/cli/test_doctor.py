"""What `headwater doctor` makes of this installation, and of what its checks find."""

from __future__ import annotations

import json
import socket
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from headwater.cli import doctor as checks
from headwater.cli.doctor import Asked, Check, Found, State, examine
from support.cases import case, each

NOTHING = Asked(storage_options={})
REQUIRES = [
    "numpy>=2.4",
    *(f"{name}; extra == 'node'" for name in ("lmdb>=3.0", "starlette>=1.10", "uvloop>=0.23")),
    *(f"{name}; extra == 'spark'" for name in ("pandas<3,>=2.2", "pyspark[connect]>=4.3", "starlette>=1.10")),
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The versions that are installed, of what `REQUIRES` names."""
    versions = {"numpy": "2.4.1", "lmdb": "3.0", "uvloop": "0.23.0rc1", "pandas": "2.3.3"}
    versions |= {"pyspark": "4.3.0", "starlette": "1.10"}

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(checks, "version", version)
    monkeypatch.setattr(checks, "distribution", lambda name: SimpleNamespace(requires=REQUIRES))
    return versions


def test_libraries_that_fit(installed: dict[str, str]) -> None:
    assert checks.check_libraries(NOTHING) == Found(State.OK, "1 library")
    assert checks.check_node_libraries(NOTHING).state is State.OK
    assert checks.check_spark_libraries(NOTHING).state is State.OK


def test_libraries_that_are_missing_or_do_not_fit(installed: dict[str, str]) -> None:
    del installed["uvloop"]
    installed |= {"numpy": "2.3.9", "pandas": "3.0.1"}
    found = checks.check_libraries(NOTHING)
    assert (found.state, found.says) == (State.FAILED, "numpy 2.3.9, and >=2.4 is needed")
    found = checks.check_node_libraries(NOTHING)
    assert (found.state, found.says) == (State.FAILED, "uvloop is missing")
    assert "pip install" in found.do
    assert "[node]" in found.do
    assert checks.check_spark_libraries(NOTHING).says == "pandas 3.0.1, and <3,>=2.2 is needed"


def test_a_part_that_is_not_installed_is_skipped_with_what_depends_on_it(installed: dict[str, str]) -> None:
    # What another extra, or another program, has brought does not count.
    del installed["lmdb"], installed["pyspark"]
    assert checks.check_libraries(NOTHING).state is State.OK
    needy = [check for check in checks.CHECKS if check.extra is not None]
    assert len(needy) == 5
    found = examine(NOTHING, tuple(needy))
    assert {one.state for one in found.values()} == {State.SKIPPED}
    for look in (checks.check_node_libraries, checks.check_spark_libraries):
        assert look(NOTHING).state is State.SKIPPED


def test_sources_that_were_not_installed_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(checks, "distribution", distribution)
    assert checks.check_libraries(NOTHING).state is State.UNKNOWN


def test_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_python(NOTHING).state is State.OK
    monkeypatch.setattr(checks, "PYTHON_MIN", (99, 0))
    assert checks.check_python(NOTHING).do == "Install Headwater with Python 99.0 or newer"


@case('openjdk version "21.0.2" 2024-01-16', State.OK, "Java 21")
@case('openjdk version "11.0.2" 2019-01-15', State.FAILED, "Java 11")
@case('java version "1.8.0_292"', State.FAILED, "Java 8")
@case("something else", State.UNKNOWN, "does not report its version")
@case(None, State.UNKNOWN, "does not report its version")
def test_java(monkeypatch: pytest.MonkeyPatch, said: str | None, state: State, says: str) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(checks.shutil, "which", lambda name: "/bin/java")
    monkeypatch.setattr(checks, "_output_of", lambda *_: said)
    found = checks.check_java(NOTHING)
    assert found.state is state
    assert says in found.says


@case(None, "can't import headwater")
@case("3 8 0.0.1\n", "with Python 3.8 and Headwater 0.0.1: not the versions that run here")
def test_workers_that_are_another_python(monkeypatch: pytest.MonkeyPatch, said: str | None, says: str) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/usr/bin/python3")
    monkeypatch.setattr(checks, "_output_of", lambda *_: said)
    found = checks.check_workers(NOTHING)
    assert found.state is State.FAILED
    assert says in found.says
    assert found.do == f"Set PYSPARK_PYTHON to {sys.executable}, or unset it"


def test_a_machine_whose_name_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_LOCAL_IP", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-name.invalid")
    found = checks.check_host_name(NOTHING)
    assert found.state is State.FAILED
    assert found.do.startswith("Add the line 127.0.0.1 no-such-name.invalid to /etc/hosts")
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    assert checks.check_host_name(NOTHING).state is State.OK


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as free:
        taken, port = other.getsockname()[1], free.getsockname()[1]
        free.close()
        assert checks.check_ports(Asked(storage_options={}, port=port, http_port=port)).state is State.OK
        found = checks.check_ports(Asked(storage_options={}, port=port, http_port=taken))
    assert (found.state, found.says) == (
        State.FAILED,
        f"port {taken} of 127.0.0.1 can't be used: address already in use",
    )
    assert found.do == "Stop what has it, or give headwater serve another one as --http-port"
    found = checks.check_ports(Asked(storage_options={}, port=port, host="203.0.113.1"))
    assert "an address of this machine as --host" in found.do


def test_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder, state in ((tmp_path, State.OK), (tmp_path / "a" / "b", State.OK), (file / "a", State.FAILED)):
        assert checks.check_data_folder(Asked(storage_options={}, data=folder)).state is state
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left behind"
    monkeypatch.setattr(checks, "FREE_BYTES_MIN", 1 << 60)
    assert checks.check_data_folder(Asked(storage_options={}, data=tmp_path)).state is State.WARNING


def test_what_comes_after_a_failure_is_unknown() -> None:
    table = (
        Check("bucket", lambda asked: Found(State.FAILED, "gone")),
        Check("rights", lambda asked: Found(State.OK, "all"), after="bucket"),
    )
    assert examine(NOTHING, table)["rights"].state is State.UNKNOWN


def test_every_check_comes_after_what_it_depends_on() -> None:
    names = [check.name for check in checks.CHECKS]
    for at, check in enumerate(checks.CHECKS):
        assert check.after is None or check.after in names[:at]


@each(("state", "exit_code"), [(State.WARNING, 0), (State.UNKNOWN, 0), (State.FAILED, 1)])
def test_the_exit_code(monkeypatch: pytest.MonkeyPatch, state: State, exit_code: int) -> None:
    found = {"lake": Found(state, "\x1b[31m it is [bold]odd[/]", "Do something")}
    monkeypatch.setattr(checks, "examine", lambda asked: found)
    result = CliRunner().invoke(checks.doctor, ["--json"])
    row = {"check": "lake", "state": state, "found": found["lake"].says, "do": "Do something"}
    assert json.loads(result.stdout) == {"ok": exit_code == 0, "checks": [row]}
    assert result.exit_code == exit_code
    result = CliRunner().invoke(checks.doctor, [])
    assert result.exit_code == exit_code
    assert "?[31m it is [bold]odd[/]" in result.stdout, "a terminal obeys nothing of it"
    assert "lake: Do something" in result.stdout.splitlines()
