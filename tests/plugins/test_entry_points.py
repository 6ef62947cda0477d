"""Plug-ins of other packages, provided by entry points and named by options of a run."""

import contextlib
import importlib
import io
import sys
from pathlib import Path

from recipes.grpo.main import main
from tests.plugins.conftest import InstallPackage
from tests.recipe_copies import last_metrics, write_untrained

OPTIONS = (
    "data.path=task:sort data.max_samples=8 prompts_per_step=4 samples_per_prompt=2 rollout.max_new_tokens=4 "
    "train.mini_batch_size=8 max_steps=2 train.precision=fp32 rollout.verify_weight_sync=true backend=local"
)
ENGINE = {
    "__init__.py": """
PROVIDES = {
    "rollout config": {"echoing": "config:EchoingConfig"},
    "rollout engine": {"echoing": "engine:EchoingEngine"},
    "weight carrier": {"noted": "carrier:NotedCarrier"},
}
""",
    "config.py": """
from dataclasses import dataclass
from typing import ClassVar

from components.generate.config import HFRolloutConfig


@dataclass(frozen=True, kw_only=True)
class EchoingConfig(HFRolloutConfig):
    NAME: ClassVar[str] = "echoing"
""",
    "engine.py": """
from components.generate.hf_engine import HFRolloutEngine

calls = []


class EchoingEngine(HFRolloutEngine):
    def generate(self, prompts, sampling):
        calls.append((type(self.config).__name__, len(prompts), self.weight_version))
        return super().generate(prompts, sampling)
""",
    "carrier.py": """
from components.weights.carrier import FolderCarrier

published, read = [], []


class NotedCarrier(FolderCarrier):
    NAME = "noted"

    def publish(self, version, tensors, **options):
        handle = super().publish(version, tensors, **options)
        published.append((version, handle.carrier))
        return handle

    @classmethod
    def read(cls, handle, timeout_seconds, *, writable, part):
        read.append(handle.version)
        return super().read(handle, timeout_seconds, writable=writable, part=part)
""",
}


def run(*options: str) -> tuple[int, str]:
    """Run grpo in this process. Return its exit code and its output."""
    console = io.StringIO()
    with contextlib.redirect_stdout(console), contextlib.redirect_stderr(console):
        code = main([*OPTIONS.split(), *options])
    return code, console.getvalue()


def test_a_run_uses_an_engine_and_a_carrier_of_another_project(install_package: InstallPackage, tmp_path: Path) -> None:
    install_package("echoing_plugin", ENGINE)
    model = f"model.path={write_untrained(tmp_path / 'model')}"
    chosen = ("rollout.engine=echoing", "rollout.weight_sync=noted")
    code, console = run(model, f"run_dir={tmp_path}/theirs", *chosen)
    assert code == 0, console
    assert importlib.import_module("echoing_plugin.engine").calls == [("EchoingConfig", 8, 0), ("EchoingConfig", 8, 1)]
    carrier = importlib.import_module("echoing_plugin.carrier")
    assert carrier.published == [(1, "noted"), (2, "noted")]
    assert carrier.read == [1, 2]
    assert "weights by noted" in console
    code, console = run(model, f"run_dir={tmp_path}/ours", "rollout.engine=hf", "rollout.weight_sync=shared_memory")
    assert code == 0, console
    theirs = last_metrics(tmp_path / "theirs")
    ours = last_metrics(tmp_path / "ours")
    compared = [name for name in ours if name.startswith(("actor/", "rollout/", "reward/"))]
    assert {"actor/loss", "actor/grad_norm"} <= set(compared)
    assert {name: theirs[name] for name in compared} == {name: ours[name] for name in compared}


def test_unknown_plug_in_names_are_refused_in_one_line_each(tmp_path: Path) -> None:
    assert "echoing_plugin" not in sys.modules
    model = f"model.path={write_untrained(tmp_path / 'model')}"
    faults = {
        "rollout.engine=echoing": "one of auto, hf, vllm, or install a plug-in that provides the rollout engine",
        "rollout.weight_sync=noted": "install a plug-in that provides the weight carrier",
        "train.engine=sharded": "install a plug-in that provides the train engine",
    }
    code, console = run(model, f"run_dir={tmp_path}/run", *faults)
    assert code == 2
    lines = console.splitlines()
    for option, words in faults.items():
        (line,) = [line for line in lines if option in line]
        assert words in line
