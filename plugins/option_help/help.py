"""The text of `--help`: an overview of a recipe's options, or one group, one plug-in, one option, or all of them."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Sequence
from typing import Any, get_type_hints

from components import registry
from plugins.option_help.groups import plugin_groups
from training.options.described import Option, describe, options_of
from training.options.schema import ConfigError, recipe_of, without_none

COLUMNS = 120
LINES = 100
"""Maximum number of lines of the overview: two screens."""
RUN = "run"
"""Name of the options that are in no group."""
ALL = "all"
NAME_COLUMNS = 40


def requested_help(schema: type, arguments: Sequence[str]) -> str:
    """Return the help that a command line requests with `--help` or `-h`, which the topic may follow.

    Args:
        schema: the options.
        arguments: the command line.

    Raises:
        ConfigError: see `help_text`.
    """
    flag = next(index for index, word in enumerate(arguments) if word in ("--help", "-h"))
    following = arguments[flag + 1 : flag + 2]
    # `--help rollout` has a topic. In `--help rollout.engine=hf` and `--help --dry_run` the next word is an option.
    return help_text(schema, next((word for word in following if not word.startswith("-") and "=" not in word), ""))


def help_text(schema: type, topic: str = "") -> str:
    """Return the help on a topic.

    Args:
        schema: the options.
        topic: name of a group, of a plug-in or of an option, or `all`. Empty for the overview.

    Raises:
        ConfigError: there is no such topic. The message names the most similar one.
    """
    if not topic:
        return overview(schema)
    options = options_of(schema)
    added = {name: options_of(group, f"{name}.") for name, (_, group) in plugin_groups().items()}
    if topic == ALL:
        return "\n".join([*_sections(options), *_added_sections(added)])
    groups = _by_group(options)
    plugins = {option.plugin for option in options if option.plugin}
    if topic in groups:
        return "\n".join(_sections(groups[topic]))
    if topic in added:
        return "\n".join(_added_sections({topic: added[topic]}))
    if topic in plugins:
        return "\n".join(_sections([option for option in options if option.plugin == topic]))
    names = {option.name: option for option in [*options, *(each for group in added.values() for each in group)]}
    # Names are often copied from a command line, with their dashes.
    if topic.removeprefix("--") in names:
        return "\n".join(_sections([names[topic.removeprefix("--")]]))
    topics = [ALL, *groups, *added, *sorted(plugins)]
    near = difflib.get_close_matches(topic, [*topics, *names], n=1)
    advice = f"use an option, or one of {', '.join(topics)}"
    if near:
        advice = f"did you mean {near[0]!r}?"
    raise ConfigError(f"--help {topic}: there is no such group, plug-in or option; {advice}")


def overview(schema: type) -> str:
    """Return one line per group and per plug-in, and one per option that has no group or that only this recipe has."""
    options = options_of(schema)
    groups = _by_group(options)
    hints = get_type_hints(schema)
    lines = [
        _cut(f"{recipe_of(schema)}: {_first_sentence(inspect.getdoc(schema) or '')}"),
        "",
        "Options are written key=value or --key value; --config FILE reads them from YAML.",
        "--help NAME describes one group, plug-in or option, as --help model; --help all describes every option.",
        "",
        "Groups, with the number of their options:",
    ]
    for group in groups:
        if group != RUN:
            meaning = _first_sentence(inspect.getdoc(without_none(hints[group])) or "")
            lines.append(_cut(f"  {group:<16}{len(groups[group]):>3}  {meaning}"))
    lines += _plugin_lines(options)
    lines += ["", "Options of every run:", *_short_lines(groups.get(RUN, []))]
    own_groups = _by_group([option for option in options if option.is_own and "." in option.name])
    # The algorithm comes first, as it is what the recipe is about.
    ordered = sorted(own_groups, key=lambda group: (group != "algorithm", len(own_groups[group])))
    for index, group in enumerate(ordered):
        section = ["", f"Options of this recipe in {group}:", *_short_lines(own_groups[group])]
        # Each later group needs at least two lines, so a long group must not use them up.
        if len(lines) + len(section) + 2 * len(ordered[index + 1 :]) > LINES:
            section = ["", f"Options of this recipe in {group}: {len(own_groups[group])}, shown by --help {group}"]
        lines += section
    return "\n".join(lines)


def describe_options(schema: type) -> str:
    """Return the description of every option of a schema."""
    return "\n".join(_sections(options_of(schema)))


def _sections(options: Sequence[Option]) -> list[str]:
    """Return the description of options: first those that need no plug-in, then the others by plug-in."""
    lines = ["Options, written key=value or --key value; --config FILE reads them from YAML:", ""]
    for option in options:
        if not option.plugin:
            lines += describe(option)
    for plugin in dict.fromkeys(option.plugin for option in options if option.plugin):
        lines += ["", f"{_plugin_title(plugin)}:", ""]
        for option in options:
            if option.plugin == plugin:
                lines += describe(option)
    return lines


def _added_sections(groups: dict[str, list[Option]]) -> list[str]:
    """Return the description of the groups of options that plug-ins add."""
    lines: list[str] = []
    for name, options in groups.items():
        condition, group = plugin_groups()[name]
        lines += ["", f"Options that a plug-in adds with {condition}: {inspect.getdoc(group) or ''}".rstrip(": "), ""]
        for option in options:
            lines += describe(option)
    return lines


def _plugin_lines(options: Iterable[Option]) -> list[str]:
    """Return one line per plug-in with options, either in the schema or in a group that the plug-in adds."""
    by_plugin: dict[str, list[str]] = {}
    for option in options:
        if option.plugin:
            by_plugin.setdefault(option.plugin, []).append(option.name)
    lines = ["", "Options that need a plug-in, by plug-in:"]
    for plugin, names in by_plugin.items():
        lines.append(_cut(f"  {plugin:<16}{len(names):>3}  {', '.join(names)}"))
    for name, (condition, group) in plugin_groups().items():
        count = len(dataclasses.fields(group))
        lines.append(_cut(f"  {name:<16}{count:>3}  with {condition}: {_first_sentence(inspect.getdoc(group) or '')}"))
    if len(lines) == 2:
        return []
    return lines


def _plugin_title(plugin: str) -> str:
    """Return the heading of a plug-in's options, with a remark if the plug-in is not installed."""
    title = f"Options of the plug-in {plugin}"
    if any(package.rpartition(".")[2] == plugin for package in registry.packages()):
        return title
    return f"{title}, which is not installed"


def _short_lines(options: Iterable[Option]) -> list[str]:
    """Return one line per option: its name, its default, and the first sentence of its description."""
    lines: list[str] = []
    for option in options:
        name = f"{option.name}={_shown(option.default)}"
        lines.append(_cut(f"  {name:<{NAME_COLUMNS}}  {_first_sentence(option.meaning)}"))
    return lines


def _by_group(options: Iterable[Option]) -> dict[str, list[Option]]:
    groups: dict[str, list[Option]] = {}
    for option in options:
        groups.setdefault(option.name.rpartition(".")[0] or RUN, []).append(option)
    return groups


def _shown(default: Any) -> str:
    """Return a default as it is written on a command line."""
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    return str(default)


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".")


def _cut(line: str) -> str:
    """Shorten a line at a space to at most COLUMNS characters."""
    if len(line) <= COLUMNS:
        return line.rstrip()
    return f"{line[: COLUMNS - 3].rpartition(' ')[0].rstrip(' ,;:')} ..."
