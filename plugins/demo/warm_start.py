"""Short supervised training of a task's tiny model, so that reinforcement learning has something to improve. Cached.

`python -m plugins.demo.warm_start --task sort` prints its progress and, as the last line, the folder of the model. The
cache key is a hash of the settings and of the source files that affect the model. A change of one of them trains a new
model; other changes do not.

Looking up and requesting a warm start needs no torch: the training runs in a child process.

<cache>/warm_start/sort-<hash>/  the files that from_pretrained loads, and warm_start.json with settings and results
"""

from __future__ import annotations

import ast
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from components.net.hub import cache_root
from components.process.streams import accept_any_text
from components.ranges import Checked, Count
from components.registry import load, module_of
from components.train.config import TrainConfig
from plugins.demo.tasks import get_task
from training.launch.programs import start_program
from training.options.config import load_config

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NOTE = "warm_start.json"
_PROJECT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class WarmStartSettings(Checked):
    """Settings of a warm start."""

    task: str = "sort"
    """Task whose demonstrations are used for training."""
    seed: int = 0
    """Seed of the initial weights and of the demonstrations."""
    steps: Count | None = None
    """Number of optimizer steps. Default: the number set by the task. More steps make the model more certain of the
    demonstrations' style, which RL then has to unlearn."""
    batch_size: Count | None = None
    """Number of demonstrations per step. Each demonstration is used once. Default: the number set by the task."""

    is_correct: bool = False
    """Train on correct responses only, which gives an expert and not a start. Not for games."""

    def __post_init__(self) -> None:
        task = get_task(self.task)
        lessons = task.lessons
        if self.is_correct and "messages" in task.demonstrations(1, 0)[0]:
            raise ValueError(f"task {self.task!r} is a game, which has no single correct response; set expert:sort")
        for name in ("steps", "batch_size"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(lessons, name))
        super().__post_init__()


def ensure_warm_start(settings: WarmStartSettings, progress: Callable[[str], None] = print) -> Path:
    """Return the folder of the warm start. If it does not exist, a child process trains it first.

    The child process keeps process groups and threads of torch out of the caller, which may be a driver without torch
    or a rank of a job.

    Args:
        settings: settings of the warm start.
        progress: called with each line of progress.

    Raises:
        RuntimeError: the training failed. The message has the end of its error output.
    """
    folder = _folder(settings)
    if (folder / _NOTE).is_file():
        return folder
    env = {name: value for name, value in os.environ.items() if name not in _RENDEZVOUS}
    env.setdefault("OMP_NUM_THREADS", "1")
    options = [f"--{name}={value}" for name, value in dataclasses.asdict(settings).items()]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
        start_program("plugins.demo.warm_start", *options, env=env, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.rstrip("\n") != str(folder):  # the last line, which is for callers and not for people
                progress(line.rstrip("\n"))
        if process.wait() != 0:
            errors.seek(0)
            tail = "\n".join(errors.read().splitlines()[-15:])
            raise RuntimeError(f"the warm start failed with exit code {process.returncode}:\n{tail}")
    return folder


def check_warm_start(settings: WarmStartSettings) -> None:
    """Check that a warm start exists or can be written.

    Raises:
        ValueError: the cache folder is not writable.
    """
    folder = _folder(settings)
    if (folder / _NOTE).is_file():
        return
    # The cache folder is not created here, because the run may still be refused for another reason.
    existing = next(parent for parent in folder.parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(
            f"the demonstration's model is kept in {folder.parent}, which cannot be written to ({error.strerror}); set "
            "TROUPE_CACHE to another folder"
        ) from error


def make_warm_start(settings: WarmStartSettings, progress: Callable[[str], None] = print) -> Path:
    """Train a warm start in this process, which must not be a rank of a job, and return its folder.

    If several processes request the same warm start, one trains it and the others wait.
    """
    folder = _folder(settings)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock"), progress):
        if not (folder / _NOTE).is_file():
            partial = folder.with_name(f"{folder.name}.partial")
            # A killed process may have left it. No other process uses it, because this one holds the lock.
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            _train(settings, partial, progress)
            partial.rename(folder)
    return folder


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. The last line of the output is the folder."""
    accept_any_text()
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--help" in arguments:
        print(load("option help", "list", "--help")(WarmStartSettings))
        return 0
    try:
        settings = load_config(WarmStartSettings, arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(make_warm_start(settings, progress=lambda line: print(line, flush=True)), flush=True)
    return 0


def source_files() -> list[Path]:
    """Return the files of components and plug-ins whose contents affect the model: this file, the training engine's,
    and everything that these import.

    The import statements are read, so that no list of files has to be updated when a file is split or moved.
    """
    paths: set[Path] = set()
    waiting = [Path(__file__).resolve()]
    if (engine := module_of("train engine", TrainConfig().engine)) is not None:
        waiting += _files_of(engine)
    while waiting:
        path = waiting.pop()
        if path in paths or not path.is_file():
            continue
        paths.add(path)
        for node in ast.walk(ast.parse(path.read_bytes(), filename=str(path))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                # `from components import batch` names a file, and `from components.batch import Batch` does not.
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            waiting += [
                file for name in names if name.startswith(("components.", "plugins.")) for file in _files_of(name)
            ]
    return sorted(paths)


def _files_of(module: str) -> list[Path]:
    """Return the possible paths of a module of this project: a file, or the `__init__` of a folder."""
    path = _PROJECT.joinpath(*module.split("."))
    return [path.with_suffix(".py"), path / "__init__.py"]


def _folder(settings: WarmStartSettings) -> Path:
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(settings), sort_keys=True).encode())
    for path in source_files():
        content = path.read_bytes()
        digest.update(f"\n{path.relative_to(_PROJECT)} {len(content)}\n".encode() + content)
    return cache_root() / "warm_start" / f"{settings.task}-{digest.hexdigest()[:16]}"


@contextmanager
def _locked(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold an exclusive lock on a file. The operating system releases it when the process ends for any reason."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that trains the same warm start (it holds the lock {path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _train(settings: WarmStartSettings, folder: Path, progress: Callable[[str], None]) -> None:
    import torch
    from torch import nn

    from components.batch import Batch
    from components.data.supervised import encode_demonstrations
    from components.models.causal import token_logprobs
    from components.rl.aggregation import LossOutput, Totals
    from components.rl.supervised import sft_loss
    from components.train.opening import open_engine
    from plugins.demo.tiny_model import task_tokenizer, tiny_model

    def loss_fn(model: nn.Module, batch: Batch, totals: Totals) -> LossOutput:
        return sft_loss(token_logprobs(model, batch).logprob_N, batch["loss_mask"], totals.tokens)

    start = time.monotonic()
    assert settings.steps and settings.batch_size  # set from the task by __post_init__
    task = get_task(settings.task)
    tokenizer = task_tokenizer(task)
    rows = task.demonstrations(settings.steps * settings.batch_size, settings.seed, settings.is_correct)
    data = encode_demonstrations(rows, tokenizer).batch
    threads = torch.get_num_threads()
    # Two threads are slower for a model of this size, and one thread gives the same result on all similar machines.
    torch.set_num_threads(1)
    try:
        model = tiny_model(tokenizer, settings.seed)
        config = TrainConfig(
            learning_rate=task.lessons.learning_rate,
            lr_scheduler="cosine_with_min_lr",
            lr_warmup_ratio=0.1,
            min_lr_ratio=0.1,
            total_steps=settings.steps,
            seed=settings.seed,
        )
        engine = open_engine(model, config)
        metrics: dict[str, float] = {}
        for step, batch in enumerate(data.split(settings.steps), 1):
            metrics = engine.train_step(batch, loss_fn)
            if step % 10 == 0 or step == settings.steps:
                progress(
                    f"warm start of {task.name}: step {step}/{settings.steps} loss={metrics['loss']:.4f} "
                    f"seconds={time.monotonic() - start:.1f}"
                )
        engine.save_hf(folder, tokenizer)
    finally:
        torch.set_num_threads(threads)
    note = {**dataclasses.asdict(settings), "loss": metrics["loss"], "seconds": time.monotonic() - start}
    # Written last: its presence means that the folder is complete.
    (folder / _NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
