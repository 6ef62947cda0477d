"""Answers to unknown options from the table synonyms.yaml: names in other systems, and the options to use here."""

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
"""Group -> the group whose options have the same names."""
_TYPO = 0.85
"""Minimum similarity (difflib) of an unknown name to a name of the table."""


@dataclass(frozen=True)
class Advice:
    """Advice for names without an option here, or with several possible ones."""

    names: Sequence[str]
    say: str
    where: str
    """The advice holds only for recipes with this option. Empty: for all recipes."""


@dataclass(frozen=True)
class Synonyms:
    """Content of synonyms.yaml."""

    options: Mapping[str, Sequence[str]]
    """Option -> names of it in other systems."""
    advice: Sequence[Advice]
    recipes: Mapping[str, Sequence[str]]
    """Option, or all options of a group (`critic.*`) -> the recipes that have it."""

    @functools.cached_property
    def names(self) -> list[str]:
        """All names that the table has an answer for."""
        all_names = [name for names in self.options.values() for name in names]
        return list(dict.fromkeys(all_names + [name for advice in self.advice for name in advice.names]))

    def options_named(self, name: str) -> list[str]:
        """Return the options that have this name in another system, the likeliest first."""
        return [option for option, names in self.options.items() if name in names]

    def elsewhere(self, option: str) -> tuple[str, Sequence[str]]:
        """Return an option (or its group) that only some recipes have, and those recipes. Empty if all have it."""
        return next(((name, had) for name, had in self.recipes.items() if fnmatchcase(option, name)), ("", ()))


@functools.cache
def synonyms() -> Synonyms:
    """Return the content of synonyms.yaml."""
    table = yaml.safe_load(Path(__file__).with_name("synonyms.yaml").read_text(encoding="utf-8"))
    advice = [Advice(each["names"].split(), each["say"], each.get("where", "")) for each in table["advice"]]
    recipes = {name: had_by.split() for names, had_by in table["recipes"].items() for name in names.split()}
    return Synonyms({option: names.split() for option, names in table["options"].items()}, advice, recipes)


def answer(unknown: str, options: Mapping[str, str], recipe: str, others: Collection[str] = ()) -> str:
    """Return the text after `unknown option ...`: the option to use instead.

    Args:
        unknown: name of the option as the user wrote it, such as `rollout.n` or `num_generations`.
        options: options of the recipe with their descriptions.
        recipe: name of the recipe.
        others: further names that the recipe accepts, which come from another system.
    """
    written = unknown.lower()
    *longer, last = _shorter(written)
    # The longest part of the name comes first: `val_kwargs.n` is more specific than `n`.
    for name in longer:
        if advice := _of_table(name, written, options):
            return advice
    if advice := _of_unknown_group(written, options, others):
        return advice
    group = f"{written.partition('.')[0]}."
    has_group = any(name.startswith(group) for name in (*options, *others))
    if not has_group and (advice := _of_other_recipes([written], recipe)):
        return advice
    if advice := _of_table(last, written, options):
        return advice
    for name in (*longer, last):
        candidates = synonyms().options_named(name)
        candidates += [option for option in synonyms().recipes if option.rpartition(".")[2] == name]
        if not has_group:
            candidates.insert(0, written)
        if advice := _of_other_recipes(candidates, recipe):
            return advice
    for name in difflib.get_close_matches(last, synonyms().names, n=1, cutoff=_TYPO):
        if advice := _of_table(name, written, options):
            return advice
    return _nearest(written, options, others)


def _shorter(name: str) -> Iterator[str]:
    """Yield `a.b.c`, `b.c` and `c` for the name `a.b.c`."""
    while name:
        yield name
        name = name.partition(".")[2]


def _of_table(name: str, written: str, options: Mapping[str, str]) -> str:
    """Return the advice of the table for a name. Empty if the table has none for these options."""
    for advice in synonyms().advice:
        if name in advice.names and (not advice.where or advice.where in options):
            return f": {advice.say}"
    meant = [option for option in synonyms().options_named(name) if option in options]
    namesakes = [option for option in options if option.rpartition(".")[2] == name]
    # `critic.lr` is not the learning rate of the policy.
    group = written.partition(".")[0]
    as_there = f"{_ALIKE.get(group, group)}."
    of_group = [f"{group}.{option.removeprefix(as_there)}" for option in meant if option.startswith(as_there)]
    if likely := [*(option for option in of_group if option in options), *meant]:
        return f": here it is {likely[0]!r}{_meaning(options[likely[0]])}"
    if len(namesakes) == 1:
        return f": here it is {namesakes[0]!r}{_meaning(options[namesakes[0]])}"
    if namesakes:
        return f"; did you mean {' or '.join(map(repr, namesakes))}?"
    return ""


def _of_unknown_group(written: str, options: Collection[str], others: Collection[str]) -> str:
    """Return the advice for `data.adarft.beta` if the other system has keys of `data`, but no group `data.adarft`."""
    group = written.rpartition(".")[0]
    top = f"{group.partition('.')[0]}."
    names = [*options, *others]
    is_known = "." not in group or any(name.startswith(f"{group}.") for name in names)
    # A group with a typo is close to the right one.
    is_near = bool(difflib.get_close_matches(written, names, n=1, cutoff=_TYPO))
    if is_known or is_near or not any(name.startswith(top) for name in others):
        return ""
    return (
        f": no option begins with {group}; if a fork or another recipe has it, add its algorithm to a copy of this "
        "recipe (docs/variants.md), or leave it out"
    )


def _of_other_recipes(meant: Sequence[str], recipe: str) -> str:
    for option in meant:
        name, had_by = synonyms().elsewhere(option)
        if had_by and recipe not in had_by:
            kind = "is an option"
            if "*" in name:
                kind = "are options"
            return f": {name} {kind} of {', '.join(had_by)}; {recipe} has none"
    return ""


def _nearest(written: str, options: Collection[str], others: Collection[str]) -> str:
    names = [*options, *others]
    near = difflib.get_close_matches(written, names, n=1, cutoff=0.6)
    # Many users write an option without its group, which makes it look unlike every full name.
    if not near:
        ends = {name.rpartition(".")[2]: name for name in reversed(names)}
        last = written.rpartition(".")[2]
        near = [ends[end] for end in difflib.get_close_matches(last, list(ends), n=1, cutoff=0.75)]
    if near:
        return f"; did you mean {near[0]!r}?"
    if len(names) <= _FEW:
        return f"; the options are {', '.join(sorted(names))}"
    return "; --help all shows all options"


def _meaning(text: str) -> str:
    """Return the first sentence of an option's description in parentheses. Empty if it has none."""
    first = text.partition(". ")[0].rstrip(".")
    if not first:
        return ""
    # An abbreviation such as KL keeps its capitals.
    if not first[1:2].isupper():
        first = first[:1].lower() + first[1:]
    return f" ({first})"
