"""W&B as a metric sink of a run: online with a key and if W&B responds, otherwise offline in the run folder."""

from __future__ import annotations

import logging
import netrc
import os
import sys
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
    """Options of a run on W&B: project, name, account and timeouts."""

    key: str | None = None
    """API key. None: WANDB_API_KEY, or else the netrc file. Without a key the run is stored offline, on disk."""
    project: str = "troupe"
    """Name of the W&B project."""
    run_name: str | None = None
    """Name of the run. None: the name of the run folder."""
    group: str | None = None
    """Name of the group. W&B shows the runs of a group together."""
    org: str | None = None
    """W&B user or team that owns the project. None: the default of the key."""
    init_timeout: float = 30.0
    """Maximum number of seconds to wait for W&B at the start. After that the run is stored offline."""
    finish_timeout: float = 60.0
    """Maximum number of seconds to upload remaining data at the end. After that it stays on disk for `wandb sync`."""


class Wandb:
    """A run of W&B, or the continuation of one."""

    TITLE = "W&B"

    @classmethod
    def open(cls, context: SinkContext, **settings: Any) -> Wandb:
        """Open the sink of a run. `settings` are the fields of `WandbConfig`."""
        config = {**context.config, "environment": context.environment}
        return cls(context.run_dir, config, WandbConfig(**settings), context.run_id)

    def __init__(self, run_dir: Path, config: Any, options: WandbConfig, run_id: str | None = None) -> None:
        """Start the run, or continue the one with the id `run_id`.

        W&B's step counter may not decrease, but it would if a run resumed from a checkpoint before its last logged
        step. Therefore W&B counts steps by itself, and the step of the run is a metric that is the x-axis of all
        others.

        Raises:
            ImportError: wandb is not installed. The message has the command that installs it.
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
        """Id of the run on W&B. A resumed run continues with it."""
        return self._run.id

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({**metrics, STEP: step})

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        # An incremental table: each call sends only its own rows, and W&B shows the rows of all calls.
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
        if "weave" not in sys.modules:
            # W&B takes our package `agents` for the one of OpenAI, and would advise to install Weave in three lines.
            os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
        resume = None
        if run_id:
            resume = "allow"
        settings = self._wandb.Settings(
            silent=True,
            console="off",
            init_timeout=options.init_timeout,
            finish_timeout=options.finish_timeout,
            # W&B's metadata has the command line of the process, and the git address may contain a login. The run's
            # config has the same facts with secrets removed.
            x_disable_meta=True,
            disable_git=True,
            # A resumed run may have changed options, or run on another machine.
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
            # Set in offline runs too, so that `wandb sync` joins the parts of a run in the order of their starts.
            resume=resume,
            config=config,
            mode=mode,
            settings=settings,
        )


@contextmanager
def _data_folder(folder: Path) -> Iterator[None]:
    """Store tables in this folder until they are sent. By default W&B would store them in the user's home folder."""
    previous = os.environ.get("WANDB_DATA_DIR")
    os.environ["WANDB_DATA_DIR"] = previous or str(folder)
    try:
        yield
    finally:
        if previous is None:
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
