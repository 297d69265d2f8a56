"""Where a lake lies, as users write it."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from headwater.errors import InvalidInput
from headwater.lake.location import Location
from support.lake_model import SmallLake


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("lake", f"{Path.cwd()}/lake"),
        ("/data/lake/", "/data/lake"),
        ("/", "/"),
        ("file:/data/lake", "/data/lake"),
        ("file:///data/my%20lake/", "/data/my lake"),
        ("file://localhost/data", "/data"),
        ("s3://bucket/lake/", "s3://bucket/lake"),
        ("s3a://bucket/lake", "s3a://bucket/lake"),
        ("gs://bucket/lake", "gs://bucket/lake"),
        ("abfss://box@account.dfs.core.windows.net/lake", "abfss://box@account.dfs.core.windows.net/lake"),
        ("C:name", f"{Path.cwd()}/C:name"),
    ],
)
def test_what_users_write(text: str, uri: str) -> None:
    assert Location.of(text).uri == uri
    assert Location.of(text).join("changes").uri == f"{uri.rstrip('/')}/changes"


@pytest.mark.parametrize("name", ["a b", "a#b?c", "ä+🙂", "100%", "%zz", "a~b", "a'b&c=d", "{x}*"])
def test_tables_lie_in_a_directory_of_any_name(tmp_path: Path, name: str) -> None:
    small = SmallLake(tmp_path / name)
    small.write(0, "a")
    small.land()
    small.write(0, "a", value=b'{"n": 2}')
    small.land()
    assert [row["n"] for row in small.rows("documents/_default._default")] == [2]
    assert {path.name for path in tmp_path.iterdir()} == {name}


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("/data/a%20b", "%20"),
        ("file:///data/a%2520b", "%20"),
        ("/data/a[b]", "["),
        ("/data/a|b", "|"),
        ("/data/a\\b", "\\\\"),
        ("/data/a\nb", "\\n"),
        ("s3://bucket/a#b", "#"),
        ("s3://bucket/a?b", "?"),
        ("s3://bucket/a%2520b", "%2520"),
    ],
)
def test_a_path_that_delta_rs_looks_for_elsewhere_is_refused(text: str, bad: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(f"does not open a path with '{bad}'")):
        Location.of(text)


def test_options_reach_executors_and_never_a_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the environment")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "of another store")
    made = Location.of("s3://bucket/lake", {"AWS_Region": "eu-west-1", "timeout": "5s"})
    expected = {"aws_secret_access_key": "of the environment", "aws_region": "eu-west-1", "timeout": "5s"}
    assert made.options == expected
    assert made.join("changes").delta_options == expected
    assert pickle.loads(pickle.dumps(made)) == made
    assert "environment" not in repr(made)


@pytest.mark.parametrize(
    ("uri", "options"),
    [
        ("az://box/lake", {"azure_allow_http": "true", "azure_storage_account_name": "me"}),
        ("s3://bucket/lake", {"aws_connect_timeout": "3s", "aws_allow_http": "true", "retry_timeout": "1m"}),
        ("gs://bucket/lake", {"google_timeout": "500ms", "allow_invalid_certificates": "false"}),
    ],
)
def test_options_of_the_client_may_have_the_prefix_of_the_store(uri: str, options: dict[str, str]) -> None:
    """delta-rs takes them so. obstore panics, and a panic is no `Exception`."""
    location = Location.of(uri, options)
    assert location.delta_options == options
    assert location._store() is not None


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("aws_timeout", "soon", "Write a time like 30s or 500ms"),
        ("retry_timeout", "1.5.2s", "Write a time like"),
        ("max_retries", "-1", "Write a whole number"),
        ("allow_http", "yes", "Write true or false"),
    ],
)
def test_values_that_the_client_can_not_read(name: str, value: str, hint: str) -> None:
    with pytest.raises(InvalidInput, match=f"'{value}' is not a valid value of {name}. {hint}"):
        Location.of("s3://bucket/lake", {name: value})


def test_a_directory_takes_no_options() -> None:
    with pytest.raises(InvalidInput, match="takes no options"):
        Location.of("/data", {"aws_region": "x"})


def test_files_of_a_directory(tmp_path: Path) -> None:
    lake = Location.of(str(tmp_path))
    assert lake.entries("nothing") == []
    with pytest.raises(FileNotFoundError):
        lake.read("a/b")
    lake.write("a/b", b"1")
    lake.write("a/b", b"22")
    assert lake.read("a/b") == b"22"
    output = lake.open_output("a/c/d")
    output.write(b"0123456789")
    assert output.tell() == 10
    output.close()
    with lake.open_input("a/c/d") as file:
        file.seek(4)
        assert file.read(3) == b"456"
    assert [(entry.name, entry.changed_at is None) for entry in lake.entries("a")] == [("b", False), ("c", True)]
