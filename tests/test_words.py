"""Pages, help texts, metrics and messages use the terms of the field and no private words."""

import ast
import csv
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from plugins.alarms.alarms import ALARMS, NOT_A_NUMBER, advice
from tests.docs_pages import PAGES, ROOT, text_of
from tests.recipe_copies import RECIPES
from training.options.described import options_of

PRIVATE = re.compile(
    r"\b(answer(?:s|ed|ing)?|worlds?|players?|houses?|rooms?|floors?|judg(?:e|es|ed|ing)|sa(?:y|ys|id|ying)"
    r"|tells?|told|telling|look(?:s|ed|ing)? back|go(?:es)? on|went on|take[sn]? turns|in turns|what is asked)\b",
    re.IGNORECASE,
)
ALLOWED = (
    "final answer",  # a column of a task's data, as a label of the scorer math, a column of GSM8K
    "mathematical answer",  # as a label of the scorer math
    "the answer ",  # a column of GSM8K
    "world size",
    "for a right answer",
)
"""Uses of these words that are common in the field."""
FOLDERS = ("core", "components", "agents", "training", "plugins", "recipes", "scripts")


def private_words(text: str) -> list[str]:
    """Return the private words of a text with their context. Names in code type do not count."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`|<!--.*?-->", " ", text, flags=re.MULTILINE | re.DOTALL)
    for allowed in ALLOWED:
        text = re.sub(re.escape(allowed), "", text, flags=re.IGNORECASE)
    return [text[max(0, m.start() - 40) : m.end() + 40].replace("\n", " ") for m in PRIVATE.finditer(text)]


def messages(path: Path) -> Iterator[str]:
    """Return the texts in a program that are not docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and " " in value and id(node) not in docstrings:
            yield value


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_private_word(page: str) -> None:
    assert private_words(text_of(page)) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_a_page_begins_with_its_purpose_for_the_reader(page: str) -> None:
    lines = [line for line in re.sub(r"<!--.*?-->", "", text_of(page), flags=re.DOTALL).splitlines() if line]
    assert lines[0].startswith("# ")
    assert re.match(r"(After|On) this page you (can|know|have)\b", lines[1]), lines[1]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_help_of_a_recipe_has_no_private_word(recipe: str) -> None:
    schema = importlib.import_module(f"recipes.{recipe}.main").COMMAND.schema
    assert {o.name: private for o in options_of(schema) if (private := private_words(o.meaning))} == {}


def test_metric_and_alarm_descriptions_have_no_private_word() -> None:
    with (ROOT / "training/tracking/metrics.csv").open(newline="") as file:
        texts = {row["name"]: row["meaning"] for row in csv.DictReader(file)}
    texts |= {alarm.name: f"{alarm.when} {advice(alarm)}" for alarm in (*ALARMS, NOT_A_NUMBER)}
    assert {name: private for name, text in texts.items() if (private := private_words(text))} == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_message_has_a_private_word(folder: str) -> None:
    private = {
        str(path): words
        for path in (ROOT / folder).rglob("*.py")
        for text in messages(path)
        if (words := private_words(text))
    }
    assert private == {}
