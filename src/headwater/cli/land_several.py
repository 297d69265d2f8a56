"""`headwater land` with several pipelines: each lands as it would alone, and they share the process.

They share the Spark session or the threads of the local runner, the page, the metrics and the terminal. A failed
pipeline does not stop the others: its reason is shown until the end, and the exit code is 1. After a temporary failure,
such as an unreachable server, a pipeline is restarted after a minute, since no supervisor could restart it alone. With
`--once` it is not restarted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from click.core import ParameterSource
from rich.console import Console
from rich.live import Live
from rich.text import Text

from headwater import errors
from headwater.cli import land
from headwater.cli.management import find_node_page
from headwater.cli.options import CONNECTION_OPTIONS, GivenOptions, LoginOptions, errors_reported, task_runners
from headwater.cli.output import click, exit_code_after, set_up_logging
from headwater.client.settings import ClientSettings
from headwater.lake.lake_look import LandingNote
from headwater.lake.location import Location
from headwater.lake_page.app import LakeState, PageAddress, serving_page
from headwater.landing.query import Landing, LandingQuery
from headwater.landing.tasks import JobRunner
from headwater.phrases import printable

POLL_S = 0.2
AGAIN_S = 60.0
"""How long to wait before a pipeline with a temporary failure is restarted."""
STOP_S_MAX = 30.0
"""How long the landings may take to stop. After that the process ends without them, as if killed; the next run
continues their work."""
OF_PROCESS = ("runs_on", "master", "memory", "metrics_port", "page_at", "ui_token", "as_json", "quiet", "log_format")
"""The parameters that apply to the whole process."""

_MAY_PASS = (errors.LakeFull, errors.LakeInUse, errors.LakeUnreachable, errors.QueryFailed)
"""Failures that remain after the landing's own retries, for which a supervisor would restart it."""

Runners = Callable[[str], JobRunner]


class Pipeline:
    """One of the pipelines. It lands in a thread of its own."""

    def __init__(
        self, name: str, url: str, landing: Landing, settings: ClientSettings, view: land.View, *, every_s: float | None
    ) -> None:
        self.name = name
        self.landing = landing
        self.location = Location.of(landing.into, landing.storage_options)
        self.view = view
        self.metrics = land.LandingMetrics(
            settings.bucket, view.status, pipeline=name, has_failed=lambda: self.failure is not None
        )
        self._url = url
        self._settings = settings
        self._every_s = every_s
        self.failure: BaseException | None = None
        self._failed_s = 0.0
        """The time of the last failure."""
        self._started_s = time.time()
        self._query: LandingQuery | None = None
        self._stopping = threading.Event()
        self._turn = threading.Lock()
        """Held while a landing starts, so that none starts after `stop`."""
        # The thread has the name of the landing's own thread, by which the log finds the pipeline of a message.
        self._thread = threading.Thread(target=self._run, name=f"headwater land {landing.into}", daemon=True)
        self._runners: Future[Runners] = Future()

    def start(self, runners: Future[Runners]) -> None:
        self._runners = runners
        self._thread.start()

    @property
    def is_active(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._land()
                return
            except CancelledError:  # Spark has not started.
                return
            except Exception as error:
                self._failed_s, self.failure = time.time(), error
                is_ours = isinstance(error, errors.HeadwaterError)
                if not is_ours:
                    traceback.print_exception(error)
                may_pass = is_ours and (error.retriable or isinstance(error, _MAY_PASS))  # type: ignore[attr-defined]
                may_pass = may_pass and not isinstance(error, errors.SparkEnded | errors.LakeTaken)
                if self._every_s is None or not may_pass:
                    return
            self._stopping.wait(AGAIN_S)

    def _land(self) -> None:
        lake = self.landing.prepare()
        runner = self._runners.result()(f"headwater land {self.landing.into}")
        with self._turn:
            if self._stopping.is_set():
                return
            query = self.landing.start(runner, every=self._every_s, on_batch=self.view.on_batch, lake=lake)
            self._query = self.view.query = query
            self.failure = None
        if self.metrics.page is not None:
            settings = self._settings
            node_page = find_node_page(self._url, settings.credentials, settings.tls_context())
            query.say_where(page=self.metrics.page, node_page=node_page)
        query.awaitTermination()

    def stop(self) -> None:
        """Stop the pipeline, and wait until its landing has ended."""
        self._stopping.set()
        with self._turn:
            query = self._query
        if query is not None:
            query.stop()

    def note(self) -> LandingNote | None:
        """Return the note for the page: the state of the landing, or why it could not be started."""
        query, failure = self._query, self.failure
        if failure is None:
            return None if query is None else query.note
        note = LandingNote(
            time_s=self._failed_s,
            started_s=self._started_s,
            source=str(replace(self._settings.where, user=None, options=())),
            bucket=self._settings.bucket,
            host=socket.gethostname(),
            every_s=self._every_s,
            is_running=False,
        )
        known = note if query is None else query.note
        return replace(known, time_s=self._failed_s, is_running=False, failure=str(failure))

    def line(self) -> Text:
        """Return the status line for the terminal."""
        if self.failure is not None:
            state = "stopped, starts again" if self.is_active else "stopped"
            return Text(printable(f"{self.name}  {state}: {self.failure}"))
        status = self.view.status()
        return Text.assemble(f"{printable(self.name)}  ", "starting" if status is None else land.status_line(status))


@errors_reported
def land_several(contexts: Mapping[str, click.Context]) -> None:
    """Land several pipelines, by their names and the contexts of their command lines."""
    shared = _options_of_process(contexts)
    if shared["log_format"] is not None:
        set_up_logging(shared["log_format"])
    master = shared["master"] if shared["runs_on"] == "spark" else None
    console = Console(stderr=True, highlight=False)
    how = {"as_json": shared["as_json"], "quiet": shared["quiet"], "logs": shared["log_format"] is not None}
    pipelines = [
        _pipeline(name, context, master, land.View(**how, pipeline=name, console=console))
        for name, context in contexts.items()
    ]
    _check_places(pipelines)
    if shared["log_format"] is not None:
        for handler in logging.getLogger().handlers:
            handler.addFilter(_Named(pipelines))
    address = None if shared["page_at"] is None else PageAddress.make(shared["page_at"], shared["ui_token"] or None)
    collector = land.LandingCollector(*(one.metrics for one in pipelines))
    land.serve_metrics(collector, shared["metrics_port"])
    runners: Future[Runners] = Future()
    try:
        with contextlib.ExitStack() as stack:
            if address is not None:
                states = {one.name: LakeState(one.location, landing=one.note) for one in pipelines}
                page = stack.enter_context(serving_page(states, address, metrics=lambda: land.metrics_text(collector)))
                for one in pipelines:
                    one.metrics.page = f"{page}#/{quote(one.name, safe='')}/overview"
                click.echo(f"The landings are shown at {page}", err=True)
            for one in pipelines:
                one.start(runners)
            # While Spark starts, which takes seconds, the pipelines inspect their buckets and tables.
            runners.set_result(stack.enter_context(task_runners(master=master, memory=shared["memory"])))
            is_live = console.is_terminal and not any(how.values())
            code = _follow(pipelines, Live(console=console, transient=True) if is_live else None)
    except BaseException:
        runners.cancel()
        raise
    sys.exit(code)


def _options_of_process(contexts: Mapping[str, click.Context]) -> dict[str, Any]:
    """Return the options of the whole process that any pipeline sets. Raises if two pipelines differ."""
    shared: dict[str, Any] = {}
    for parameter in OF_PROCESS:
        asked = {
            name: context.params[parameter]
            for name, context in contexts.items()
            if context.get_parameter_source(parameter) is not ParameterSource.DEFAULT
        }
        values = [*asked.values()] or [next(iter(contexts.values())).params[parameter]]
        if any(value != values[0] for value in values):
            # The message omits the values: one of these options is a secret.
            other = next(name for name, value in asked.items() if value != values[0])
            option = next(one for one in contexts[other].command.params if one.name == parameter)
            raise errors.InvalidInput(
                f"the pipelines {next(iter(asked))} and {other} differ in {option.opts[0]}, which a process has once",
                hint="Give it on the command line, or land them in processes of their own",
            )
        shared[parameter] = values[0]
    return shared


def _pipeline(name: str, context: click.Context, master: str | None, view: land.View) -> Pipeline:
    with context.scope(cleanup=False):
        params = context.params
        login = LoginOptions(**{option: params[option] for option in CONNECTION_OPTIONS})
        try:
            tables = GivenOptions(params).make(land.TableOptions)
            url, settings = params["url"], login.settings(params["url"])
            landing = land.landing_of(url, settings, params["into"], params["storage_options"], master, tables, params)
            return Pipeline(name, url, landing, settings, view, every_s=None if params["once"] else params["every"])
        except errors.HeadwaterError as error:
            raise error.reworded(f"{name}: {error.reason}") from error


def _check_places(pipelines: Sequence[Pipeline]) -> None:
    places: dict[str, str] = {}
    schemas: dict[tuple[str, str], str] = {}
    for one in pipelines:
        if (catalog := one.landing.catalog) is not None:
            schema = catalog.schema_for(one.metrics.bucket)
            other = schemas.setdefault((catalog.catalog, schema), one.name)
            if other != one.name:
                raise errors.InvalidInput(
                    f"the pipelines {other} and {one.name} register their tables in the same schema, {schema}",
                    hint="Give each pipeline its own schema in headwater.toml",
                )
        other = places.setdefault(one.location.uri.rstrip("/"), one.name)
        if other != one.name:
            raise errors.InvalidInput(
                f"the pipelines {other} and {one.name} land into the same place, {one.location.uri}",
                hint="Give each pipeline its own directory",
            )


class _Named(logging.Filter):
    """Adds the pipeline's name to the log messages of its threads."""

    def __init__(self, pipelines: Sequence[Pipeline]) -> None:
        super().__init__()
        self._names = {f"headwater land {one.landing.into}": one.name for one in pipelines}

    def filter(self, record: logging.LogRecord) -> bool:
        name = self._names.get((record.threadName or "").removesuffix(": lag").removesuffix(": catalog"))
        if name is not None and not hasattr(record, "pipeline"):
            record.pipeline, record.msg, record.args = name, f"{name}: {record.getMessage()}", ()
        return True


def _follow(pipelines: Sequence[Pipeline], live: Live | None) -> int:
    """Show the state of the pipelines until all have ended. Returns the exit code."""
    said: dict[str, BaseException] = {}

    def say_failures() -> None:
        """Report each failure once."""
        for one in pipelines:
            if one.failure is not None and said.get(one.name) is not one.failure:
                said[one.name] = one.failure
                one.view.say_failed(one.failure)

    try:
        with live or contextlib.nullcontext():
            while any(one.is_active for one in pipelines):
                time.sleep(POLL_S)
                say_failures()
                for one in pipelines:
                    one.view.refresh()
                if live is not None:
                    live.update(Text("\n", no_wrap=True, overflow="ellipsis").join(one.line() for one in pipelines))
    except KeyboardInterrupt as error:
        left = _stop(pipelines)
        say_failures()
        if left:
            click.echo(f"Not stopped within {STOP_S_MAX:.0f} s: {printable(', '.join(left))}", err=True)
        pipelines[0].view.say_stopped()
        if left:
            # Their threads would delay the end of the process.
            sys.stdout.flush()
            os._exit(exit_code_after(error))
        return exit_code_after(error)
    say_failures()
    for one in pipelines:
        if one.failure is None:
            one.view.finish()
    return 1 if any(one.failure is not None for one in pipelines) else 0


def _stop(pipelines: Sequence[Pipeline]) -> list[str]:
    """Stop all pipelines in parallel. Returns the names of those that have not stopped in time."""
    threads = {one.name: threading.Thread(target=one.stop, daemon=True) for one in pipelines}
    for thread in threads.values():
        thread.start()
    until_s = time.monotonic() + STOP_S_MAX
    for thread in threads.values():
        thread.join(max(0.0, until_s - time.monotonic()))
    return [name for name, thread in threads.items() if thread.is_alive()]
