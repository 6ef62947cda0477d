"""Names of options that people bring along, and what to use here: synonyms.yaml, as answers to unknown options."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import yaml

_FEW = 20
"""Maximum number of options listed in a message."""
_ALIKE = {"critic": "train", "evaluation": "rollout"}
"""Groups with options of the same names as those of another."""
_TYPO = 0.85
"""Minimum similarity (difflib) of an unknown name to a name of the table."""


@dataclass(frozen=True)
class Advice:
    """Advice for names without an option here, or with several possible ones."""

    names: Sequence[str]
    say: str
    where: str
    """Only in schemas with this option; empty: in all."""


@dataclass(frozen=True)
class Synonyms:
    """The whole table."""

    options: Mapping[str, Sequence[str]]
    """Names elsewhere, by option."""
    advice: Sequence[Advice]
    recipes: Mapping[str, Sequence[str]]
    """The recipes that have an option, or the options of a group (`critic.*`)."""

    @functools.cached_property
    def names(self) -> list[str]:
        """All names for which the table has an answer."""
        all_names = [name for names in self.options.values() for name in names]
        return list(dict.fromkeys(all_names + [name for advice in self.advice for name in advice.names]))

    def meant_by(self, name: str) -> list[str]:
        """The options that go by this name elsewhere, the likeliest first."""
        return [option for option, names in self.options.items() if name in names]

    def elsewhere(self, option: str) -> tuple[str, Sequence[str]]:
        """An option which not all recipes have, or its group, and those that have it; empty: not known."""
        return next(((name, had) for name, had in self.recipes.items() if fnmatchcase(option, name)), ("", ()))


@functools.cache
def synonyms() -> Synonyms:
    """Read synonyms.yaml."""
    table = yaml.safe_load(Path(__file__).with_name("synonyms.yaml").read_text(encoding="utf-8"))
    advice = [Advice(each["names"].split(), each["say"], each.get("where", "")) for each in table["advice"]]
    recipes = {name: had_by.split() for names, had_by in table["recipes"].items() for name in names.split()}
    return Synonyms({option: names.split() for option, names in table["options"].items()}, advice, recipes)


def answer(unknown: str, options: Mapping[str, str], recipe: str, others: Collection[str] = ()) -> str:
    """Return the text after `unknown option ...`: the option to use instead.

    Args:
        unknown: option as it was written, `rollout.n` or `num_generations`.
        options: options of the recipe, with their meanings.
        recipe: name of the recipe.
        others: further names that the recipe accepts, of another system.
    """
    written = unknown.lower()
    *longer, last = _shorter(written)
    for name in longer:
        if advice := _of_table(name, written, options):
            return advice
    group = f"{written.partition('.')[0]}."
    has_group = any(name.startswith(group) for name in (*options, *others))
    if not has_group and (advice := _of_other_recipes([written], recipe)):
        return advice
    if advice := _of_table(last, written, options):
        return advice
    for name in (*longer, last):
        namesakes = [option for option in synonyms().recipes if option.rpartition(".")[2] == name]
        candidates = [] if has_group else [written]
        if advice := _of_other_recipes([*candidates, *synonyms().meant_by(name), *namesakes], recipe):
            return advice
    for name in difflib.get_close_matches(last, synonyms().names, n=1, cutoff=_TYPO):
        if advice := _of_table(name, written, options):
            return advice
    return _nearest(written, options, others)


def _shorter(name: str) -> Iterator[str]:
    """`a.b.c`, `b.c` and `c`."""
    while name:
        yield name
        name = name.partition(".")[2]


def _of_table(name: str, written: str, options: Mapping[str, str]) -> str:
    """Return the advice of the table for a name; empty if it has none for this schema."""
    for advice in synonyms().advice:
        if name in advice.names and (not advice.where or advice.where in options):
            return f": {advice.say}"
    meant = [option for option in synonyms().meant_by(name) if option in options]
    namesakes = [option for option in options if option.rpartition(".")[2] == name]
    # `critic.lr` is not the learning rate of the policy.
    group = written.partition(".")[0]
    as_there = f"{_ALIKE.get(group, group)}."
    of_group = [f"{group}.{option.removeprefix(as_there)}" for option in meant if option.startswith(as_there)]
    if likely := [*(option for option in of_group if option in options), *meant]:
        return f": here it is {likely[0]!r}{_meaning(options[likely[0]])}"
    if len(namesakes) == 1:
        return f": here it is {namesakes[0]!r}{_meaning(options[namesakes[0]])}"
    return f"; did you mean {' or '.join(map(repr, namesakes))}?" if namesakes else ""


def _of_other_recipes(meant: Sequence[str], recipe: str) -> str:
    for option in meant:
        name, had_by = synonyms().elsewhere(option)
        if had_by and recipe not in had_by:
            kind = "are options" if "*" in name else "is an option"
            return f": {name} {kind} of {', '.join(had_by)}; {recipe} has none"
    return ""


def _nearest(written: str, options: Collection[str], others: Collection[str]) -> str:
    names = [*options, *others]
    near = difflib.get_close_matches(written, names, n=1, cutoff=0.6)
    if not near:  # without the groups
        ends = {name.rpartition(".")[2]: name for name in reversed(names)}
        last = written.rpartition(".")[2]
        near = [ends[end] for end in difflib.get_close_matches(last, list(ends), n=1, cutoff=0.75)]
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; the options are {', '.join(sorted(names))}" if len(names) <= _FEW else "; --help all shows all options"


def _meaning(text: str) -> str:
    """The first sentence of what an option means, after its name."""
    first = text.partition(". ")[0].rstrip(".")
    return f" ({first if first[1:2].isupper() else first[:1].lower() + first[1:]})" if first else ""
