"""W&B as a metric sink of a run: online if there is a key and W&B responds, otherwise offline in the run folder."""

from __future__ import annotations

import logging
import netrc
import os
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.tracking.redaction import hide_in_text, remember_secret
from training.tracking.sinks import SinkContext

logger = logging.getLogger(__name__)

STEP = "step"


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Project, name and account of a run on W&B."""

    key: str | None = None
    """API key. None: WANDB_API_KEY, else the netrc file; with none of them the run is kept offline, on disk."""
    project: str = "troupe"
    """Name of the W&B project."""
    run_name: str | None = None
    """Name of the run. None: the name of the run folder."""
    group: str | None = None
    """Runs of one group are shown together."""
    org: str | None = None
    """The W&B user or team that owns the project. None: the key's default."""
    init_timeout: float = 30.0
    """Seconds that W&B may take to answer at the start; after that the run is kept offline."""
    finish_timeout: float = 60.0
    """Seconds that W&B may take at the end to send what is left; after that it stays on disk, for `wandb sync`."""


class Wandb:
    """One run of W&B, or its continuation."""

    TITLE = "W&B"

    @classmethod
    def open(cls, context: SinkContext, **settings: Any) -> Wandb:
        """Open the sink of a run. Settings are those of `WandbConfig`."""
        config = {**context.config, "environment": context.environment}
        return cls(context.run_dir, config, WandbConfig(**settings), context.run_id)

    def __init__(self, run_dir: Path, config: Any, options: WandbConfig, run_id: str | None = None) -> None:
        """Start the run, or continue with the one called `run_id`.

        W&B's own steps may not go back, and do so when a run resumes from a checkpoint before its last line. So they
        are left to W&B, and ours are a metric by which all others are drawn.
        """
        try:
            import wandb
            import wandb.errors
        except ImportError as error:
            raise ImportError(f"{error}; `bash scripts/setup.sh wandb` installs it") from error
        self._wandb: Any = wandb
        self._table: Any = None
        remember_secret(options.key)
        remember_secret(os.environ.get("WANDB_API_KEY"))
        self._staging = run_dir.resolve() / "wandb" / "staging"
        mode = _mode(options, run_dir)
        try:
            self._run = self._start(run_dir, config, options, mode, run_id)
        except wandb.errors.Error as error:
            if mode != "online":
                raise
            problem = hide_in_text(str(error))
            logger.warning("W&B does not respond (%s); this run is kept offline in %s", problem, run_dir / "wandb")
            self._run = self._start(run_dir, config, options, "offline", run_id)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    @property
    def run_id(self) -> str:
        """The name under which W&B knows the run; a resumed run continues with it."""
        return self._run.id

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({**metrics, STEP: step})

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        # One table that grows: each call sends its own rows, and W&B shows all of them.
        if self._table is None:
            columns = [STEP, *(name for name in rows[0] if name != STEP)]
            self._table = self._wandb.Table(columns=columns, log_mode="INCREMENTAL", allow_mixed_types=True)
        for row in rows:
            values = {**row, STEP: step}
            self._table.add_data(*(values.get(name) for name in self._table.columns))
        with _data_folder(self._staging):
            self._run.log({"samples": self._table, STEP: step})

    def close(self) -> None:
        self._run.finish()

    def _start(self, run_dir: Path, config: Any, options: WandbConfig, mode: str, run_id: str | None) -> Any:
        settings = self._wandb.Settings(
            silent=True,
            console="off",
            init_timeout=options.init_timeout,
            finish_timeout=options.finish_timeout,
            # W&B's notes on the process hold its command line, and the login of the repository's address. What
            # matters of them is in `config`, redacted.
            x_disable_meta=True,
            disable_git=True,
            # A resumed run may have other options, and another machine.
            allow_val_change=True,
        )
        if options.key:
            settings.api_key = options.key
        return self._wandb.init(
            dir=str(run_dir),
            project=options.project,
            entity=options.org,
            group=options.group,
            name=options.run_name or run_dir.resolve().name,
            id=run_id,
            # Offline runs note it too, so that `wandb sync` puts their parts together, in the order of their starts.
            resume="allow" if run_id else None,
            config=config,
            mode=mode,
            settings=settings,
        )


@contextmanager
def _data_folder(folder: Path) -> Iterator[None]:
    """Let tables wait here until they are sent; W&B's choice would be the user's home."""
    given = os.environ.get("WANDB_DATA_DIR")
    os.environ["WANDB_DATA_DIR"] = given or str(folder)
    try:
        yield
    finally:
        if given is None:
            del os.environ["WANDB_DATA_DIR"]


def _mode(options: WandbConfig, run_dir: Path) -> str:
    mode = os.environ.get("WANDB_MODE")
    if mode is not None:
        return mode
    if options.key or _has_key():
        return "online"
    logger.warning(
        "no W&B key found (WANDB_API_KEY or netrc): this run is kept offline in %s; `wandb sync` sends it later",
        run_dir / "wandb",
    )
    return "offline"


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urllib.parse.urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
