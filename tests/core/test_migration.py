"""Names of DLRover and verl that differ in core: each has an alias, or raises an error with its replacement."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import core
from core import BaseWorkload, JobBuilder, register, trainer_invocation
from core.migration import Replacement, replacements

PAGE = Path(__file__).parents[2] / "docs" / "core_migration.md"
WHERE = {
    "core": "`core`",
    "builder": "a job builder",
    "resource": "`resource()`",
    "workload": "a workload",
    "trainer_invocation": "`trainer_invocation`",
    "register": "`register`",
}
USES: dict[str, Callable[[str], Any]] = {
    "core": lambda name: getattr(core, name),
    "builder": lambda name: getattr(JobBuilder(), name),
    "resource": lambda name: JobBuilder().role("a").run("a:B").resource(**dict[str, Any]({name: 1})),
    "workload": lambda name: getattr(BaseWorkload.__new__(BaseWorkload), name),
    "trainer_invocation": lambda name: trainer_invocation(**dict[str, Any]({name: len})),
    "register": lambda name: register(**dict[str, Any]({name: 1})),
}


def rows() -> list[tuple[str, str, Replacement]]:
    """Return all replacements as (place of use, name, replacement)."""
    return [(where, name, replacement) for (where, name), replacement in replacements().items()]


@pytest.mark.parametrize(("where", "name", "replacement"), [row for row in rows() if not row[2].alias])
def test_a_name_without_an_alias_raises_an_error_with_its_replacement(
    where: str, name: str, replacement: Replacement
) -> None:
    with pytest.raises((ImportError, AttributeError, ValueError), match=re.escape(replacement.advice)) as caught:
        USES[where](name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("where", "name", "replacement"), [row for row in rows() if row[2].alias])
def test_a_name_with_an_alias_is_provided(where: str, name: str, replacement: Replacement) -> None:
    if where == "core":
        assert getattr(core, name) is getattr(core, replacement.alias)
    elif where == "workload":
        workload = BaseWorkload.__new__(BaseWorkload)
        vars(workload).update(world_size=2, role="REFERENCE")
        assert getattr(workload, name) == getattr(workload, replacement.alias)
    else:
        USES[where](name)


def test_an_import_of_a_name_with_a_replacement_shows_the_replacement() -> None:
    with pytest.raises(ImportError, match=r"core has no PrimeMaster; use builder\.build\(\)\.submit\(name\)"):
        from core import PrimeMaster  # pyright: ignore[reportAttributeAccessIssue, reportUnusedImport]  # noqa: F401


@pytest.mark.parametrize("where", USES)
def test_an_unknown_name_raises_an_error_that_names_it(where: str) -> None:
    if where == "resource":
        return  # any other name is a custom resource of the cluster
    with pytest.raises((AttributeError, ValueError), match="no_such_name"):
        USES[where]("no_such_name")
    assert not hasattr(core, "no_such_name")


def test_a_property_that_raises_keeps_its_error() -> None:
    class Failing(BaseWorkload):
        @property
        def broken(self) -> int:
            return self.not_there  # pyright: ignore[reportAttributeAccessIssue]

    with pytest.raises(AttributeError, match="not_there"):
        _ = Failing.__new__(Failing).broken


def test_the_migration_page_has_the_rows_of_the_csv_file() -> None:
    table = [f"| {WHERE[where]} | `{name}` | {replacement.advice} |" for where, name, replacement in rows()]
    text = PAGE.read_text(encoding="utf-8")
    missing = [row for row in table if row not in text.splitlines()]
    assert not missing, "docs/core_migration.md lacks these lines of core/migration.csv:\n" + "\n".join(missing)
    assert len(re.findall(rf"^\| (?:{'|'.join(map(re.escape, WHERE.values()))}) \| ", text, re.MULTILINE)) == len(table)
