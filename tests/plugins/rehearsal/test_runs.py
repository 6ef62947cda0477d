"""Whole rehearsals: the small run loses a worker of each role, resumes, and exports a model that loads."""

from pathlib import Path

import pytest

from recipes.grpo.main import main
from tests.large_models import large_model
from tests.plugins.rehearsal.commands import words, write_inputs

ENDLESS = """
import time


class AgentInstance:
    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        while True:
            time.sleep(1)
"""
PARTS = ("start", "generation", "training", "weight sync", "checkpoint", "stop, resume", "evaluation", "export")


def verdicts(folder: Path) -> dict[str, str]:
    """Return the first line of each part in the written table."""
    lines = (folder / "rehearsal.txt").read_text().splitlines()
    return {line[:15].strip(): line[16:].strip() for line in lines if not line.startswith(" ")}


@pytest.mark.nightly
def test_a_small_command_is_rehearsed_to_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = write_inputs(tmp_path) | {"placement.nodes": "1", "placement.devices_per_node": "1"}
    code = main(words(options))
    out, _ = capfd.readouterr()
    table = verdicts(tmp_path / "run-rehearsal-1")
    assert code == 0, out + (tmp_path / "run-rehearsal-1" / "output.log").read_text()[-3000:]
    assert "GO: every rehearsed part works" in out
    assert {name for name in (*PARTS, "kill actor-0", "kill rollout-0", "kill trainer-0") if name in table} == {
        *(*PARTS, "kill actor-0", "kill rollout-0", "kill trainer-0")
    }
    assert "restarted" in table["kill actor-0"]
    assert "replaced" in table["kill rollout-0"]
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "run-rehearsal-1" / "models").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen2.5-32B", "Qwen3-30B-A3B"])
def test_a_command_for_32_gpus_is_rehearsed_to_the_end(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = large_model(tmp_path / name, name)
    options = write_inputs(tmp_path, model=str(model)) | {"algorithm.kl_coef": "0.001", "train.precision": "bf16"}
    options["parallel.expert" if "A3B" in name else "parallel.tensor"] = "4"
    code = main(words(options))
    out, _ = capfd.readouterr()
    assert code == 0, out
    assert {"kill actor-1", "kill reference-0", "kill rollout-1", "kill trainer-0"} < set(
        verdicts(tmp_path / "run-rehearsal-1")
    )


@pytest.mark.nightly
def test_an_agent_that_never_ends_is_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = write_inputs(tmp_path) | {"placement.nodes": "1", "placement.devices_per_node": "1"}
    (tmp_path / "agent.py").write_text(ENDLESS)
    del options["reward.source"]
    code = main(words(options | {"agent.func_path": f"{tmp_path}/agent.py"}))
    out, _ = capfd.readouterr()
    assert code == 1, out
    assert "FAIL" in verdicts(tmp_path / "run-rehearsal-1")["start"]
    assert "hangs" in out
