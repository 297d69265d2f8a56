"""Sessions that can't be started, the Python of their workers, and our own errors inside those of Spark."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from headwater import errors
from headwater.errors import AuthenticationFailed, HeadwaterError, InvalidInput, LakeOutOfStep, QueryFailed
from headwater.spark import session
from headwater.spark.query_errors import in_one_sentence, query_error
from headwater.spark.session import start_session, use_this_python
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


@each(
    ("text", "kind", "sentence"),
    [
        (WRAPPED.format(name="OfTheFuture", sentence=SENTENCE), HeadwaterError, SENTENCE),
        (WRAPPED.format(name="STATUS_ERRORS", sentence=SENTENCE), HeadwaterError, SENTENCE),
        (
            "pyspark.errors.exceptions.base.PySparkRuntimeError: headwater.errors.AuthenticationFailed: no. Check it",
            AuthenticationFailed,
            "no. Check it",
        ),
        (
            "Job aborted due to stage failure\n\tat org.apache.spark",
            QueryFailed,
            "the query failed: Job aborted due to stage failure. See Spark's log for details",
        ),
        ("x" * 10_000, QueryFailed, f"the query failed: {'x' * 500}. See Spark's log for details"),
        ("", QueryFailed, "the query failed: . See Spark's log for details"),
    ],
)
def test_other_errors_of_spark(text: str, kind: type[HeadwaterError], sentence: str) -> None:
    found = query_error(RuntimeError(text))
    assert (type(found), str(found)) == (kind, sentence)


def test_an_error_of_ours_that_is_not_wrapped() -> None:
    """It may come from the driver itself."""
    error = LakeOutOfStep("out of step", hint="Do that")
    assert query_error(error) is error


# --- the Python of workers ----------------------------------------------------------------------------------------


class OtherPython:
    """A session whose workers run the first python3 on the path."""

    def __init__(self, master: str, answer: tuple[str, str | None] = ("/usr/bin/python3", "No module named 'numba'")):
        self.sparkContext = self
        self.master = master
        self.pythonExec = "python3"
        self.jobs = 0
        self._answer = answer

    def parallelize(self, *_: object) -> OtherPython:
        return self

    def map(self, _: object) -> OtherPython:
        return self

    def collect(self) -> list[tuple[str, str | None]]:
        self.jobs += 1
        return [self._answer]


def test_workers_on_this_machine_run_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "")
    monkeypatch.delenv("PYSPARK_PYTHON")
    session: Any = OtherPython("local[*]")
    use_this_python(session)
    assert (session.pythonExec, os.environ["PYSPARK_PYTHON"], session.jobs) == (sys.executable, sys.executable, 0)


@each(("master", "chosen"), [("spark://host:7077", None), ("local[2]", "/usr/bin/python3")])
def test_workers_that_have_no_headwater(master: str, chosen: str | None) -> None:
    """On other machines this Python may not exist, and what a user has chosen is not changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", chosen or "")
        if chosen is None:
            patch.delenv("PYSPARK_PYTHON")
        session: Any = OtherPython(master)
        with pytest.raises(InvalidInput) as raised:
            use_this_python(session)
        assert str(raised.value) == (
            "Spark's workers run /usr/bin/python3, which has no Headwater: No module named 'numba'. Set PYSPARK_PYTHON"
            f" to a Python that has it, such as {sys.executable}, before the session is started"
        )
        patch.setattr("headwater.spark.session._HAVE_HEADWATER", set())
        fine: Any = OtherPython(master, ("/opt/python", None))
        use_this_python(fine)
        use_this_python(fine)
        assert (fine.pythonExec, fine.jobs) == ("python3", 1)


def test_an_error_of_ours_leaves_a_worker_as_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HIDE_TRACEBACK", "")

    def hides(error: Exception, program: str) -> bool:
        monkeypatch.setenv("SPARK_HIDE_TRACEBACK", "")
        monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=SimpleNamespace(name=program)))
        with pytest.raises(type(error)), in_one_sentence():
            raise error
        return bool(os.environ["SPARK_HIDE_TRACEBACK"])

    assert hides(InvalidInput("no"), "pyspark.daemon")
    assert not hides(ZeroDivisionError(), "pyspark.daemon"), "a fault keeps its traceback"
    assert not hides(InvalidInput("no"), "notebook"), "a program's own workers are left alone"
