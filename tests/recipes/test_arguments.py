"""What arrives in a role is shared memory: nobody may write into it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from recipe_runs import ROOT


@pytest.mark.parametrize(
    ("recipe", "methods"),
    [
        ("openrlhf_ppo", 30),
        ("grpo", 14),
        ("reinforce_pp", 14),
        ("multi_turn", 14),
        ("verl_ppo", 19),
        ("reward_model", 6),
        ("dpo", 9),
    ],
)
def test_no_method_of_a_role_changes_its_arguments(recipe: str, methods: int, policy: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("role_arguments.py")), recipe, str(policy), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.endswith(" kept")]) == methods, done.stdout
    assert not [line for line in lines if line.endswith("changed")]
    assert [line for line in lines if "untested" in line and not line.endswith("[]")] == []
