"""Generates a section for every command from its help."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import click

from handbook.markdown import table
from headwater.cli import COMMANDS, load_command
from headwater.cli.options import CONNECTION_OPTIONS

_OWN_HELP = "--help"
_CONNECTS = "And [the options to connect](cli.md#options-to-connect)."


def all_commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every command with the words that invoke it. A group comes before its commands."""
    for name in sorted(COMMANDS):
        yield from _below(f"headwater {name}", load_command(name))


def _below(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from _below(f"{path} {name}", command.commands[name])


_GROUPS_PAGE = "management.md"
"""The page of the commands that are in groups: there are many, and users rarely look for them."""


def command_list() -> str:
    """Return a table with one row per command. The row of a group links to its commands."""
    rows: dict[str, tuple[str, str, list[str]]] = {}
    for path, command in all_commands():
        name = " ".join(path.split()[:2])
        first_line = (command.help or "").strip().partition("\n")[0]
        page = _GROUPS_PAGE if isinstance(command, click.Group) or path != name else ""
        link = f"{page}#{path.replace(' ', '-')}"
        _, _, below = rows.setdefault(name, (f"[`{name}`]({link})", first_line, []))
        if path != name:
            below.append(f"[{path.removeprefix(name).strip()}]({link})")
    cells = [(link, " · ".join([_escaped(what), *below])) for link, what, below in rows.values()]
    return table(("command", "what it does"), cells)


def command_sections() -> str:
    return _sections(of_groups=False)


def management_sections() -> str:
    return _sections(of_groups=True)


def _sections(*, of_groups: bool) -> str:
    groups = {path for path, command in all_commands() if isinstance(command, click.Group)}
    return "\n\n".join(
        _section(path, command)
        for path, command in all_commands()
        if (" ".join(path.split()[:2]) in groups) is of_groups
    )


def _section(path: str, command: click.Command) -> str:
    level = "##" if path.count(" ") == 1 else "###"
    parts = [f"{level} {path}", f"```console\n{_usage(path, command)}\n```", *_paragraphs(command.help or "")]
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    connects = {option.name for option in options} >= set(CONNECTION_OPTIONS)
    rows = [_row(option) for option in options if not (connects and option.name in CONNECTION_OPTIONS)]
    rows = [row for row in rows if not row[0].startswith(f"`{_OWN_HELP}")]
    if rows:
        parts.append(table(("option", "meaning", "default"), rows))
    return "\n\n".join([*parts, _CONNECTS] if connects else parts)


def some_options(command: str, *names: str) -> str:
    """Return the rows of a command's table for these options, given as they are typed."""
    options = {name: option for option in load_command(command).params for name in option.opts}
    rows = [_row(option) for name in names if isinstance(option := options[name], click.Option)]
    return table(("option", "meaning", "default"), rows)


def retention_options() -> str:
    return some_options(
        "serve",
        "--history-seconds",
        "--history-bytes",
        "--purge-age-seconds",
        "--expiry-interval",
        "--compact-interval",
    )


def limit_options() -> str:
    return some_options(
        "serve",
        "--connections-max",
        "--http-connections-max",
        "--auth-seconds",
        "--idle-seconds",
        "--unsent-bytes-max",
        "--stalled-seconds",
        "--pending-bytes-max",
        "--node-pending-bytes-max",
        "--node-buffer-bytes-max",
    )


def connection_options() -> str:
    """Return the options that all connecting commands share, taken from one of these."""
    options = [option for option in load_command("tail").params if option.name in CONNECTION_OPTIONS]
    return table(("option", "meaning"), [_row(option)[:2] for option in options if isinstance(option, click.Option)])


def _usage(path: str, command: click.Command) -> str:
    context = click.Context(command, info_name=path)
    return " ".join([path, *command.collect_usage_pieces(context)])


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the help as Markdown: paragraphs after `\\b` are code."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        lines = paragraph.strip().splitlines()
        if lines and lines[0].strip() == "\b":
            example = textwrap.dedent("\n".join(lines[2:]))
            yield f"```console\n{example}\n```"
        else:
            yield _escaped(" ".join(line.strip() for line in lines))


def _row(option: click.Option) -> tuple[str, str, str]:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    metavar = "" if option.is_flag else f" {_metavar(option)}"
    shown = names[:-1] + metavar + "`" if metavar else names
    meaning = re.sub(r"\s*\[default: (?P<what>[^\]]*)\]", "", option.help or "")
    variable = option.envvar if isinstance(option.envvar, str) else None
    if variable is not None:
        meaning += f" Or the variable `{variable}`."
    return shown, _escaped(meaning), _default(option)


def _metavar(option: click.Option) -> str:
    if option.metavar is None and isinstance(option.type, click.types.IntParamType | click.types.FloatParamType):
        return "N"
    return option.make_metavar(click.Context(click.Command("x")))


def _default(option: click.Option) -> str:
    written = re.search(r"\[default: (?P<what>[^\]]*)\]", option.help or "")
    if written is not None:
        return written["what"]
    if option.required:
        return "needed"
    default = option.default
    if option.is_flag or default is None or callable(default) or default == () or not option.show_default:
        return ""
    return f"`{default}`" if isinstance(default, int | float | str) else ""


def _escaped(text: str) -> str:
    """Escape characters that have a meaning in Markdown."""
    return re.sub(r"(?<!`)\b_(?=\w)", r"\\_", text).replace("*", "\\*").replace("<", "&lt;")
