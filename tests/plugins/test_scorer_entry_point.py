"""A scorer of another package, provided by an entry point."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from components import registry
from components.rewards.base import check_reward
from plugins.option_help.help import describe_options
from recipes.grpo.config import GRPOConfig
from tests.messages import says
from tests.recipe_copies import ROOT, write_untrained

FILES = {
    "letters/__init__.py": 'PROVIDES = {"scorer": {"vowels": "scoring:vowels"}}',
    "letters/scoring.py": (
        "def vowels(response, label):\n"
        "    count = sum(letter in 'aeiou' for letter in response)\n"
        "    return {'score': count / max(len(response), 1), 'count': count}\n"
    ),
    "letters-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: letters\nVersion: 1.0\n",
    "letters-1.0.dist-info/entry_points.txt": "[troupe.plugins]\nletters = letters\n",
}
OPTIONS = """data.path=task:sort data.max_prompt_tokens=16 prompts_per_step=2 samples_per_prompt=2 max_steps=2
    rollout.engine=hf rollout.max_new_tokens=4 reward.source=vowels backend=local"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of the package, which this process can import."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    registry._provided.cache_clear()
    yield tmp_path
    registry._provided.cache_clear()


def test_help_and_the_error_of_an_unknown_scorer_list_its_name(installed: Path) -> None:
    assert "`vowels`" in describe_options(GRPOConfig)
    check_reward("vowels")
    with pytest.raises(ValueError, match=says("'vowel'", "exact_match", "vowels", "a .py file")):
        check_reward("vowel")


@pytest.mark.nightly
def test_a_run_uses_the_scorer(installed: Path) -> None:
    model = write_untrained(installed / "model")
    run_dir = installed / "run"
    done = subprocess.run(
        [sys.executable, "-m", "recipes.grpo.main", f"model.path={model}", f"run_dir={run_dir}", *OPTIONS.split()],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{installed}"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    counts = [step["reward/count"] for step in steps if "reward/count" in step]
    assert len(counts) == 2 and all(0 <= count <= 4 for count in counts)


def test_without_the_package_the_run_is_refused_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "recipes.grpo.main", "model.path=warm_start:sort", *OPTIONS.split()],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 2
    message = done.stderr.strip()
    assert "'vowels'" in message and "no plug-in provides it" in message and "\n" not in message
