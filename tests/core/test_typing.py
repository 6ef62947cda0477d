"""Type checks of groups by pyright: correct uses pass, and each mistake is reported on its line by the noted rule."""

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.docs_pages import PAGES, ROOT, blocks

pytestmark = pytest.mark.full  # pyright belongs to the extra `dev`

MISTAKES = ROOT / "tests/core/typed_mistakes.py"
USES = ROOT / "tests/core/typed_uses.py"
Reports = dict[int, set[str]]
"""Line number -> rules reported on that line."""


def reports_on(*files: Path) -> dict[str, Reports]:
    """Run pyright and return its reports by file name."""
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    output = json.loads(done.stdout)
    assert output["summary"]["filesAnalyzed"] == len(files), done.stdout + done.stderr
    reports: dict[str, Reports] = {file.name: defaultdict(set) for file in files}
    for report in output["generalDiagnostics"]:
        number = report["range"]["start"]["line"] + 1
        reports[Path(report["file"]).name][number].add(report.get("rule", report["message"]))
    return reports


def test_correct_uses_pass_and_each_mistake_is_reported_by_its_rule(tmp_path: Path) -> None:
    text = MISTAKES.read_text(encoding="utf-8")
    outside = tmp_path / MISTAKES.name  # a copy, because pyproject.toml excludes the original
    outside.write_text(text)
    expected: Reports = {}
    for number, line in enumerate(text.splitlines(), 1):
        rules = re.search(r"  # (report\w+(?:, report\w+)*)$", line)
        if rules:
            expected[number] = set(rules[1].split(", "))
    assert len(expected) > 50
    reports = reports_on(outside, USES)
    assert reports[outside.name] == expected
    assert reports[USES.name] == {}


def test_the_jobs_in_the_documentation_pass(tmp_path: Path) -> None:
    shown = [block for page in PAGES for block in blocks(page) if block.language == "python"]
    jobs = [block.text for block in shown if "(BaseTrainer)" in block.text]
    assert len(jobs) >= 4
    files = [tmp_path / f"job_{number}.py" for number in range(len(jobs))]
    for file, text in zip(files, jobs, strict=True):
        file.write_text(text)
    assert reports_on(*files) == {file.name: {} for file in files}
