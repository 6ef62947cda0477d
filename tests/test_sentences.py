"""Docstrings, names and statements follow the rules of CONTRIBUTING.md. The allow-list only shrinks."""

import json
from pathlib import Path

from tests.architecture import ROOT
from tests.sentences import (
    ALLOWED,
    DENSITIES,
    FOLDERS,
    counts_of,
    densities,
    density_faults,
    excess,
    missed_densities,
    places_in,
)

BAD = '''"""What a file has."""
LIMIT = 3
"""Of the tokens, at most so many."""


def choose(found, size):
    """Whether it fits."""
    own, rest = size, 2
    own, rest = rest, own
    text = "a" if size else "b" if rest else "c"
    return text * bool(found), [1] * (size > 2), 2 * size
'''


def test_no_file_exceeds_its_counts_in_the_allow_list() -> None:
    allowed = json.loads(ALLOWED.read_text(encoding="utf-8"))
    assert excess(counts_of(ROOT), allowed) == []


def test_each_phrasing_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "core" / "bad.py"
    path.parent.mkdir()
    path.write_text(BAD, encoding="utf-8")
    counts = {rule: len(places) for rule, places in places_in(path).items()}
    assert counts == {
        "first_word": 3,
        "empty_name": 3,
        "nested_conditional": 1,
        "multiplied_by_condition": 2,
        "tuple_assignment": 1,
        "conditional_expression": 2,
    }
    faults = excess(counts_of(tmp_path), {"first_word": {"core/bad.py": 2}, "empty_name": {"core/bad.py": 3}})
    assert [fault.partition(";")[0] for fault in faults] == [
        "core/bad.py: first_word 3 times, at most 2",
        "core/bad.py: nested_conditional 1 times, at most 0",
        "core/bad.py: multiplied_by_condition 2 times, at most 0",
    ]


def test_the_allow_list_names_files_and_layers_that_exist() -> None:
    allowed = json.loads(ALLOWED.read_text(encoding="utf-8"))
    assert set(allowed.pop(DENSITIES, {})) <= set(FOLDERS)
    assert [file for files in allowed.values() for file in files if not (ROOT / file).is_file()] == []


def test_no_layer_is_denser_or_has_fewer_comments_than_its_bars() -> None:
    allowed = json.loads(ALLOWED.read_text(encoding="utf-8"))
    assert density_faults(densities(ROOT), allowed.get(DENSITIES, {})) == []


def test_a_density_may_only_approach_its_bar() -> None:
    table = {
        "core": {"tuple_assignment": 0.8, "conditional_expression": 14.0, "comments": 3.5},
        "training": {"tuple_assignment": 5.1, "conditional_expression": 13.0, "comments": 5.0},
    }
    allowed = {"core": {"conditional_expression": 13.5, "comments": 3.0}}
    assert density_faults(table, allowed) == [
        "core: 14.0 conditional_expression per 1,000 lines of code, at most 13.5",
        "training: 5.1 tuple_assignment per 1,000 lines of code, at most 5.0",
    ]
    assert missed_densities(table, allowed) == {"core": {"conditional_expression": 13.5, "comments": 3.5}}
