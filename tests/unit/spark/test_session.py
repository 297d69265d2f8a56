"""Sessions that can't be started, and our own errors inside those of Spark."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import NoReturn

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from headwater import errors
from headwater.errors import AuthenticationFailed, HeadwaterError, InvalidInput, LakeOutOfStep, QueryFailed
from headwater.spark import session
from headwater.spark.session import query_error, start_session
from support.cases import each

SENTENCE = "something is wrong: 'this'. Do that"
WRAPPED = """[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: Traceback (most recent call last):
  File "worker.py", line 1, in main
headwater.errors.{name}: {sentence}

	at org.apache.spark.sql.Something(Something.scala:1)
Caused by: java.lang.RuntimeException: headwater.errors.InvalidInput: another one
"""


@pytest.mark.parametrize(("master", "says"), [("", "Spark knows no master ''"), ("local[x]", "Spark does not start")])
def test_a_master_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, master: str, says: str) -> None:
    def fail(builder: object) -> NoReturn:
        raise PySparkRuntimeError("the Java process has ended")

    monkeypatch.setattr(session, "_check_java", lambda: None)
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", fail)
    with pytest.raises(InvalidInput, match=rf"{says}.*such as local\[\*\]"):
        start_session(master=master, log_folder=tmp_path)


@each("name", [name for name, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, HeadwaterError)])
def test_every_error_of_ours_is_found(name: str) -> None:
    found = query_error(RuntimeError(WRAPPED.format(name=name, sentence=SENTENCE)))
    assert type(found) is getattr(errors, name)
    assert str(found) == SENTENCE


def test_an_error_that_this_version_does_not_know() -> None:
    found = query_error(RuntimeError(WRAPPED.format(name="OfTheFuture", sentence=SENTENCE)))
    assert type(found) is HeadwaterError
    assert str(found) == SENTENCE


def test_a_name_that_is_no_error() -> None:
    found = query_error(RuntimeError(WRAPPED.format(name="STATUS_ERRORS", sentence=SENTENCE)))
    assert isinstance(found, HeadwaterError)
    assert str(found) == SENTENCE


def test_an_error_of_spark() -> None:
    found = query_error(RuntimeError("Job aborted due to stage failure\n\tat org.apache.spark"))
    assert isinstance(found, QueryFailed)
    assert str(found) == "the query failed: Job aborted due to stage failure. Spark's log has the rest of it"


def test_a_long_one_is_cut() -> None:
    assert len(str(query_error(RuntimeError("x" * 10_000)))) < 1000


def test_one_that_says_nothing() -> None:
    assert isinstance(query_error(RuntimeError()), QueryFailed)


def test_one_of_ours_that_is_not_wrapped() -> None:
    """It may come from the driver itself."""
    error = LakeOutOfStep("out of step", hint="Do that")
    assert query_error(error) is error


def test_a_text_with_a_module_before_it() -> None:
    text = "pyspark.errors.exceptions.base.PySparkRuntimeError: headwater.errors.AuthenticationFailed: no. Check it"
    found = query_error(RuntimeError(text))
    assert isinstance(found, AuthenticationFailed)
    assert str(found) == "no. Check it"
