"""Tiny models for the engine tests, written to folders as a user would have them."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

END = 1
VOCAB = 20


def write_model(
    folder: Path, seed: int, tied: bool, hidden: int = 64, positions: int = 64, spread: float = 0.15
) -> Path:
    """A random Qwen2 whose weights are large enough that its choices are far from uniform."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=spread,
        tie_word_embeddings=tied,
        bos_token_id=2,
        eos_token_id=END,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tied", seed=1, tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "untied", seed=2, tied=False)


@pytest.fixture(scope="session")
def other_tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of `tied_model` with other weights."""
    return write_model(tmp_path_factory.mktemp("models") / "other_tied", seed=3, tied=True)


@pytest.fixture(scope="session")
def other_untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of `untied_model` with other weights."""
    return write_model(tmp_path_factory.mktemp("models") / "other_untied", seed=4, tied=False)


RunRanks = Callable[..., None]


@pytest.fixture(scope="session")
def run_ranks() -> RunRanks:
    """Run train_worker.py, or another worker, with the arguments given for each number of ranks, all at the same time.

    The second argument is the folder where each rank leaves `log<rank>.txt`, which has to stay empty.
    """

    def start(worker: str, arguments: list[str], rank: int, world_size: int, port: int) -> "subprocess.Popen[bytes]":
        hidden = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"}
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
        if world_size > 1:
            rendezvous = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment |= {name: str(value) for name, value in rendezvous.items()}
        folder = Path(arguments[1])
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"log{rank}.txt").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name(worker)), *arguments],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def run(arguments: dict[int, list[str]], worker: str = "train_worker.py") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        started = [
            (Path(own[1]) / f"log{rank}.txt", start(worker, own, rank, world_size, port))
            for world_size, own in arguments.items()
            for rank in range(world_size)
        ]
        try:
            for log, process in started:
                code = process.wait(timeout=240)
                assert (code, log.read_text()) == (0, "")
        finally:
            for _, process in started:
                process.kill()
                process.wait()

    return run
