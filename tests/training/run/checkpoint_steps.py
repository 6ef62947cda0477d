"""Checkpoint steps whose files identify the writing that made them. Imports no pytest, for processes that are
killed.
"""

from collections.abc import Callable
from pathlib import Path

from plugins.resume.checkpoints import read_state
from training.run.checkpoint import Checkpoints, step_of


def writer(generation: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        for name in ("state/actor/rank_0.bin", "hf/model.bin"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(generation)

    return write


def save(box: Checkpoints, step: int, generation: str = "a") -> Path:
    return box.save(step, {"step": step, "generation": generation}, writer(generation))


def assert_whole(folder: Path) -> None:
    state = read_state(folder)
    assert state["step"] == step_of(folder)
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.bin")}
    assert files == dict.fromkeys(["state/actor/rank_0.bin", "hf/model.bin"], state["generation"])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
