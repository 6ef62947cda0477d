"""Options that name metric sinks and the monitoring endpoint, with and without their plug-ins."""

from collections.abc import Iterator

import pytest

from components import registry
from recipes.grpo.main import main
from training.options.log_options import LogOptions

PLUGINS = (".wandb", ".tensorboard", ".monitoring")


@pytest.fixture
def without_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A project without the plug-ins."""
    packages = [package for package in registry.packages() if not package.endswith(PLUGINS)]
    monkeypatch.setattr(registry, "packages", lambda: packages)
    registry._provided.cache_clear()
    yield
    registry._provided.cache_clear()


def test_sinks_are_named_by_their_options() -> None:
    assert LogOptions().sinks() == {}
    assert LogOptions(tensorboard=True).sinks() == {"tensorboard": {"folder": None}}
    assert LogOptions(tensorboard_dir="x").sinks() == {"tensorboard": {"folder": "x"}}
    wandb = LogOptions(wandb_key="key", wandb_name="a").sinks()["wandb"]
    assert (wandb["key"], wandb["project"], wandb["run_name"]) == ("key", "troupe", "a")


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("log.wandb=true", "metric sink wandb"),
        ("log.tensorboard=true", "metric sink tensorboard"),
        ("log.metrics_port=0", "run observer monitoring"),
    ],
)
def test_an_option_whose_plug_in_is_missing_is_refused_in_one_line(
    option: str, named: str, without_plugins: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--dry_run", option]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{option}: no plug-in" in line
    assert named in line
