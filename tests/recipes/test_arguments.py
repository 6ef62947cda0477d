"""Arguments of a role are in shared memory, so no method may write to them."""

from pathlib import Path

import pytest
import role_arguments
from local_runs import kept_environment

pytestmark = pytest.mark.full


# multi_turn and reinforce_pp have grpo's roles.
@pytest.mark.parametrize(
    ("recipe", "methods"),
    [("openrlhf_ppo", 31), ("grpo", 19), ("verl_ppo", 22), ("reward_model", 6), ("dpo", 9)],
)
def test_no_method_of_a_role_changes_its_arguments(
    recipe: str, methods: int, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    with kept_environment():
        role_arguments.main(recipe, str(policy), tmp_path)
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert len([line for line in lines if line.endswith(" kept")]) == methods, output
    assert not [line for line in lines if line.endswith("changed")]
    assert [line for line in lines if "untested" in line and not line.endswith("[]")] == []
