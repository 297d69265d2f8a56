"""Named pipelines: `headwater land NAME` takes its URL and its options from a file, `headwater.toml`; `headwater verify
NAME` takes its own options from the same pipeline.

```toml
[pipelines.shop]
url = "couchbases://db.example/shop"
into = "s3://lake/shop"
collection = ["shop.orders", "shop.items"]
password = "${SHOP_PASSWORD}"
storage-option = { aws_region = "eu-west-1" }
```

The keys of a pipeline are put in front of the command line, except those that the command line itself gives. So there
is no second list of options to maintain: a key is an option's name without its dashes, and is checked and converted
like the option. `--no-KEY` turns off a flag that the file turns on. An argument with `://` in it is a URL, and any
other is the name of a pipeline.

Several names, or `--all`, become several command lines: the same options with one name each. All of them are checked
before the first one runs.

Secrets come from the environment, by `${NAME}`, because such a file is kept in a repository. A literal secret is
rejected, and no error repeats a value that may be a secret.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, Self

from headwater.cli import load_command
from headwater.cli.output import RichCommand, click
from headwater.client.connection_string import ConnectionString
from headwater.errors import InvalidConnectionString
from headwater.phrases import did_you_mean, printable

FILE_NAME = "headwater.toml"
FILE_BYTES_MAX = 1 << 20
PIPELINES_MAX = 64
"""The limit for one process: each pipeline has threads, and takes a share of the memory."""
_TABLE = "pipelines"
_URL = "url"
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_STORE = "storage-option"
_SECRET_OF_STORE = re.compile(r"secret|password|token(?!_file)|key(?!_id|_enabled)", re.IGNORECASE)
"""Matches the names of object store options that are secrets. Services have many such options, and add new ones."""
_PASSWORD_IN_URI = re.compile(r"://[^/@:]*:([^/@]+)@")

_OF_LANDING = ("json", "master")
"""Options for how a landing runs and what it prints. Other commands have options of the same names."""

config_option = click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, readable=True),
    metavar="FILE",
    expose_value=False,
    help=f"The file that defines the pipeline NAME. The default is {FILE_NAME} in the current directory.",
)


all_option = click.option(
    "--all",
    "every_pipeline",
    is_flag=True,
    expose_value=False,
    help=f"All pipelines of {FILE_NAME}, at most {PIPELINES_MAX}.",
)

_NOT_KEYS = ("config", "every_pipeline", "help")
_SEVERAL = "several"
"""The key in a context's parameters for the contexts of several pipelines, by name."""
_OF_ONE = frozenset(
    {"into", "collections", "scopes", "columns", "cluster_by", "groups", "iceberg_table", "transform", "where"}
)
"""The parameters that name a location, or objects in one bucket: they can't apply to several pipelines at once."""


class CommandWithPipelines(RichCommand):
    """A command whose argument `url` may be the name of a pipeline, which then becomes the `obj` of its context. It
    needs `config_option` and `all_option`.

    The keys are those of `land`. Another command uses the keys that are its own options, except those for how a
    landing runs, and takes its `directory` from `into`.
    """

    _run_several: Callable[[Mapping[str, click.Context]], None] | None = None

    def runs_several(self, function: Callable[[Mapping[str, click.Context]], None]) -> None:
        """Decorate the function that runs several pipelines. Without one, they run one after the other, even if
        some fail: the exit code is then 1 if any failed, and otherwise the largest."""
        self._run_several = function

    def invoke(self, ctx: click.Context) -> Any:
        several: Mapping[str, click.Context] | None = ctx.params.get(_SEVERAL)
        if several is None:
            return super().invoke(ctx)
        if self._run_several is not None:
            return self._run_several(several)
        codes = [self._exit_code(name, one) for name, one in several.items()]
        return sys.exit(1 if 1 in codes else max(codes))

    def _exit_code(self, name: str, ctx: click.Context) -> int:
        click.echo(f"{printable(name)}:", err=bool(ctx.params.get("as_json")))
        try:
            with ctx:
                super().invoke(ctx)
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else 1
        return 0

    def _parse_several(
        self, ctx: click.Context, names: Sequence[str], given: Mapping[str, Any], words: Sequence[str]
    ) -> list[str]:
        for option in self.params:
            if option.name in _OF_ONE and option.name in given:
                raise click.UsageError(f"{option.opts[0]} is for one pipeline: write it into {FILE_NAME}.", ctx)
        if len(names) > PIPELINES_MAX:
            raise click.UsageError(f"One process takes at most {PIPELINES_MAX} pipelines, not {len(names)}.", ctx)
        ctx.params[_SEVERAL] = {
            name: self.make_context(ctx.info_name, [*words, "--", name], parent=ctx.parent) for name in names
        }
        ctx.args = []
        return []

    def _several_names(self, ctx: click.Context, given: Mapping[str, Any], more: Sequence[str]) -> list[str]:
        """Return the names if there are several, or with `--all`; otherwise an empty list."""
        named = [given[_URL], *more] if isinstance(given.get(_URL), str) else [*more]
        if given.get("every_pipeline"):
            if named:
                raise click.UsageError("--all is for all pipelines, and takes no NAME.", ctx)
            return _all_names(_config_of(given))
        if len(named) < 2 or any(parameter.name == "directory" for parameter in self.params):
            return []
        if any("://" in name for name in named):
            raise click.UsageError("Several landings are given by their names in a file, and not by URLs.", ctx)
        return list(dict.fromkeys(named))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        own = pipeline_options(self).items()
        flags = {f"--no-{key}": key for key, option in own if option.is_flag and not option.secondary_opts}
        turned_off = {flags[word] for word in args if word in flags}
        kept = [word for word in args if word not in flags]
        given, more, order = self.make_parser(ctx).parse_args(args=[*kept])
        if names := self._several_names(ctx, given, more):
            off = [word for word in args if word in flags]
            return self._parse_several(ctx, names, given, [*off, *_option_words(given, order)])
        name = given.get(_URL)
        if not isinstance(name, str) or "://" in name:
            if isinstance(given.get("config"), str):
                raise click.UsageError("--config is for a pipeline, which is given by its name and not by a URL.", ctx)
            return super().parse_args(ctx, args)
        pipeline = _Pipeline.read(_config_of(given), name)
        options = known = pipeline_options(self)
        if self.name != "land":
            options = {key: option for key, option in options.items() if key not in _OF_LANDING}
            known = pipeline_options(load_command("land"))
        pipeline.check_keys(known)
        asked = {key: one for key, one in options.items() if key in pipeline.values and key not in turned_off}
        from_file = {key: one for key, one in asked.items() if one.name not in given}
        words = [word for key, option in from_file.items() for word in pipeline.words(key, option)]
        try:
            rest = super().parse_args(ctx, [*words, *kept])
        except click.MissingParameter as error:
            pipeline.fail(f"it has no {_key(error.param)}", "Add it, or give it on the command line")
        except click.BadParameter as error:
            key = _key(error.param)
            if key not in from_file:
                raise
            pipeline.fail(f"{key}: {error.message}")
        ctx.params[_URL], ctx.obj = pipeline.url, name
        if "directory" in ctx.params and not isinstance(given.get("directory"), str):
            ctx.params["directory"] = pipeline.into
        return rest


def pipeline_options(command: click.Command) -> dict[str, click.Option]:
    """Return the options that a pipeline can have, by key: all except those that locate the pipeline itself."""
    return {
        _key(option): option
        for option in command.params
        if isinstance(option, click.Option) and option.name not in _NOT_KEYS
    }


def pipeline_name() -> str:
    """Return the name of the running command's pipeline, or an empty string for a command with a URL."""
    context = click.get_current_context(silent=True)
    return "" if context is None or context.obj is None else str(context.obj)


def _config_of(given: Mapping[str, Any]) -> Path:
    config = given.get("config")
    return Path(config if isinstance(config, str) else FILE_NAME)


def _option_words(given: Mapping[str, Any], order: Sequence[click.Parameter]) -> Iterator[str]:
    """Yield the options of a parsed command line, without the pipelines' names."""
    for option in dict.fromkeys(order):
        if not isinstance(option, click.Option) or option.name is None or option.name == "every_pipeline":
            continue
        value = given[option.name]
        if option.is_flag:
            yield (option.opts if value else option.secondary_opts)[0]
        else:
            for one in value if option.multiple else [value]:
                yield f"--{_key(option)}={one}"


def _key(parameter: click.Parameter | None) -> str:
    assert parameter is not None, "click names what it refuses"
    return max(parameter.opts, key=len).lstrip("-")


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """One pipeline of a file."""

    file: Path
    name: str
    values: Mapping[str, Any]
    """By key, as parsed from TOML."""

    @classmethod
    def read(cls, file: Path, name: str) -> Self:
        tables = _read_tables(file, name)
        if name not in tables:
            near = get_close_matches(name, tables, n=1)
            hint = did_you_mean(near[0]) if near else "A URL would begin with couchbase:// or couchbases://"
            _fail(f"{file} has no pipeline {name!r}", hint)
        return cls(file, name, tables[name])

    def fail(self, what: str, hint: str = "") -> NoReturn:
        _fail(f"{self.file}: {_TABLE}.{self.name}: {what}", hint)

    def check_keys(self, options: Mapping[str, click.Option]) -> None:
        """Raise for a key that is not an option, and for literal secrets, even in options that are not used."""
        for key, value in self.values.items():
            if key != _URL and key not in options:
                near = get_close_matches(key, [_URL, *options], n=1)
                self.fail(f"there is no option {key}", did_you_mean(near[0]) if near else "See headwater land --help")
            for place, one in _leaves(key, value):
                for secret in _secrets(key, place, str(one)):
                    if not _REFERENCE.fullmatch(secret):
                        hint = "Write ${NAME}, and put the secret into that variable of the environment"
                        self.fail(f"{place} has a secret written out", hint)

    @property
    def url(self) -> str:
        value = self.values.get(_URL)
        if not isinstance(value, str):
            self.fail("it has no url", 'Add one: url = "couchbase://host/bucket"')
        url = self._expanded(_URL, value)
        try:
            ConnectionString.parse(url)
        except InvalidConnectionString as error:
            self.fail(str(error))
        return url

    @property
    def into(self) -> str:
        value = self.values.get("into")
        if not isinstance(value, str):
            self.fail("it has no into", "Add it, or give the directory on the command line")
        return self._expanded("into", value)

    def words(self, key: str, option: click.Option) -> Iterator[str]:
        """Yield the words that a key stands for on the command line."""
        value, spelling = self.values[key], max(option.opts, key=len)
        if option.is_flag:
            if not isinstance(value, bool):
                self.fail(f"{key} is either on or off", "Write true or false")
            yield from [spelling] if value else option.secondary_opts[:1]
            return
        takes_pairs = "=" in (option.metavar or "")
        if isinstance(value, dict) and not takes_pairs:
            self.fail(f"{key} takes no table", f'Write {key} = "…"')
        if isinstance(value, list) and not option.multiple:
            self.fail(f"{key} takes one value", f'Write {key} = "…"')
        for place, one in _leaves(key, value):
            if isinstance(one, bool) or not isinstance(one, str | int | float):
                self.fail(f"{place} must be text or a number", "Put it in quotes")
            pair = f"{place.removeprefix(key + '.')}=" if isinstance(value, dict) else ""
            yield f"{spelling}={pair}{self._expanded(place, str(one))}"

    def _expanded(self, place: str, text: str) -> str:
        """Replace references to variables of the environment."""
        if "${" in _REFERENCE.sub("", text):
            self.fail(f"{place} has a ${{ that begins no ${{NAME}}", "Write ${NAME}, with the name of a variable")
        for name in _REFERENCE.findall(text):
            if name not in os.environ:
                self.fail(f"{place} needs the variable {name}, which the environment does not have", "Set it")
        return _REFERENCE.sub(lambda match: os.environ[match[1]], text)


def _all_names(file: Path) -> list[str]:
    """Return the names of all pipelines, in the order of the file."""
    names = [*_read_tables(file, None)]
    if not names:
        _fail(f"{file} has no pipelines", f"Write [{_TABLE}.NAME] above the keys of one")
    return names


def _read_tables(file: Path, name: str | None) -> dict[str, dict[str, Any]]:
    """Return all pipelines of a file, in its order. `name` is the requested one, for messages; None means all."""
    root = _read_toml(file, name)
    for other in root.keys() - {_TABLE}:
        _fail(f"{file}: {other!r} is not known", did_you_mean(f"[{_TABLE}.{name or 'NAME'}]"))
    tables = root.get(_TABLE, {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        _fail(f"{file}: {_TABLE} must hold tables", f"Write [{_TABLE}.NAME] above the keys of a pipeline")
    return tables


def _read_toml(file: Path, name: str | None) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            data = stream.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        if name is None:
            _fail(f"there is no {file}", "Name another file with --config")
        # Most likely, the user meant a URL and left out its scheme.
        _fail(
            f"{name!r} is not a URL, and there is no {file} with a pipeline of that name",
            "Write couchbase://host/bucket, or name the file with --config",
        )
    except OSError as error:
        _fail(f"{file} can't be read: {error.strerror}")
    if len(data) > FILE_BYTES_MAX:
        _fail(f"{file} has more than {FILE_BYTES_MAX >> 20} MiB", "Is it the right file?")
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        _fail(f"{file} is not UTF-8 (at byte {error.start})", "Save it as UTF-8")
    except tomllib.TOMLDecodeError as error:
        _fail(f"{file} is not valid TOML: {error}")
    except RecursionError:
        _fail(f"{file} is not valid TOML: it is nested too deeply")


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values in lists and tables, each with its path. TOML parses `shop.orders = …` as a table in a table."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _leaves(f"{place}.{name}", one)
    elif isinstance(value, list):
        for one in value:
            yield from _leaves(place, one)
    else:
        yield place, value


def _secrets(key: str, place: str, text: str) -> Iterator[str]:
    """Yield the parts of a text that must not be literal."""
    if "password" in key or key == "ui-token":
        yield text
    if key == _STORE:
        name, _, value = (place[len(key) + 1 :], "", text) if place != key else text.partition("=")
        if _SECRET_OF_STORE.search(name):
            yield value
    if in_uri := _PASSWORD_IN_URI.search(text):
        yield in_uri[1]


def _fail(what: str, hint: str = "") -> NoReturn:
    sentence = what if what.endswith((".", "?")) or not hint else f"{what}."
    raise click.ClickException(printable(f"{sentence} {hint}".strip()))
