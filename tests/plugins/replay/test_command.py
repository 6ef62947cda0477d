"""A step that cannot be replayed is refused with the reason."""

import json
from pathlib import Path

import pytest

from plugins.replay.command import main


def test_a_run_that_cannot_be_replayed_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert main([str(run), "--step", "1"]) == 2
    assert f"{run} is not the folder of a run" in capsys.readouterr().err
    (run / "config.yaml").write_text("checkpoint: {path: null}\n")
    (run / "summary.json").write_text(json.dumps({"recipe": "grpo"}))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    assert main([str(run), "--step", "7"]) == 2
    assert "has no step 7; it has logged the steps 1 to 1" in capsys.readouterr().err
    (run / "replays" / "step_1").mkdir(parents=True)
    assert main([str(run), "--step", "1"]) == 2
    assert "exists already; remove it, or set --out" in capsys.readouterr().err
