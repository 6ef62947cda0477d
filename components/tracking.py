"""What a run leaves behind: metrics, rollouts, a summary. Files are the truth; W&B reads along.

Nothing here may stop a training run: a sink that fails is switched off with one warning. Nothing here needs
torch.

<run_dir>/config.yaml  environment.json  metrics.jsonl  summary.json  rollouts/step_000012.parquet
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import logging
import math
import netrc
import os
import platform
import re
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import yaml

if TYPE_CHECKING:
    from components.batch import Batch

logger = logging.getLogger(__name__)

Status = Literal["finished", "failed", "stopped"]

PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "ray", "numpy", "pyarrow", "wandb")

HIDDEN = "***"
_SECRET_NAME = re.compile(
    r"(^|[._\-])(api_?key|access_?key|private_?key|secret(_?key)?|password|passwd|credentials?|key|token)$",
    re.IGNORECASE,
)
# Names that end like a secret and are none: fields of the data, and marks of the vocabulary.
_HARMLESS_NAME = re.compile(
    r"(input|label|output|prompt|response|chosen|rejected|images?|messages?|metric|answer|eos|bos|pad|unk|stop|mask"
    r"|sep|cls)_(key|token)$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|sk-[\w\-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|wandb_v1_[\w\-]{16,})")
_URL_LOGIN = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
_SWITCHES = {"", "true", "false", "yes", "no", "on", "off", "0", "1", "none", "null"}


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Where W&B shows a run."""

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


class Sink(Protocol):
    """One place that metrics go to."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of one step; numbers may be infinite or NaN."""
        ...

    def close(self) -> None:
        """Send what is still held back."""
        ...


class Tracker:
    """Records one run. Lives in the trainer's process, and is the only writer of the files while it runs."""

    def __init__(
        self,
        run_dir: str | Path,
        recipe: str,
        config: Any,
        seed: int,
        *,
        wandb: WandbConfig | None = None,
        resume_step: int = 0,
    ) -> None:
        """Open the run's files; write its config and environment.

        Args:
            run_dir: the run's folder; made if missing.
            recipe: the name of the recipe, for the summary.
            config: a mapping or dataclass; written with keys and tokens hidden.
            seed: the run's seed, for the summary.
            wandb: log to W&B too; None leaves it off.
            resume_step: metrics of later steps are removed, as those steps are done again; 0 begins anew.
        """
        self.run_dir = Path(run_dir)
        self._sinks: dict[str, Sink] = {}
        self._off: set[str] = set()
        hidden = redact(config)
        (self.run_dir / "rollouts").mkdir(parents=True, exist_ok=True)
        self._guard("config.yaml", lambda: write_config(self.run_dir, config))
        self._guard("environment.json", lambda: write_environment(self.run_dir))
        self._open_sink("metrics.jsonl", lambda: _JsonLines(self.run_dir / "metrics.jsonl", resume_step))
        if wandb is not None:
            self._open_sink("W&B", lambda: _Wandb(self.run_dir, hidden, wandb))
        self._guard("summary.json", lambda: _begin_summary(self.run_dir, recipe, seed, keep=resume_step > 0))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of one step: numbers, or tensors and arrays of one number."""
        plain = {name: _plain_number(value) for name, value in metrics.items()}
        for name, sink in list(self._sinks.items()):
            if not self._guard(name, lambda sink=sink: sink.log(step, plain)):
                del self._sinks[name]

    def rollouts(self, step: int, batch: Batch) -> None:
        """Write the sequences of one step to `rollouts/step_<step>.parquet`, a row for each."""
        self._guard("rollouts", lambda: _write_rollouts(self.run_dir, step, batch))

    def update_summary(self, **fields: Any) -> None:
        """Set fields of summary.json; of `seconds` and `score` only the parts that are given."""
        _check_fields(fields)
        self._guard("summary.json", lambda: _merge_summary(self.run_dir, fields))

    def close(self) -> None:
        """Flush the sinks. The summary's status is for `finish_summary`, which the driver calls."""
        for name, sink in self._sinks.items():
            self._guard(name, sink.close)
        self._sinks.clear()

    def _open_sink(self, name: str, make: Callable[[], Sink]) -> None:
        def open_it() -> None:
            self._sinks[name] = make()

        self._guard(name, open_it)

    def _guard(self, name: str, act: Callable[[], object]) -> bool:
        """Do something that the run can live without; after its first failure it is not tried again."""
        if name in self._off:
            return False
        try:
            act()
        # A full disk, a network that is gone, a bug in a sink: the training goes on whatever it is.
        except Exception as error:  # noqa: BLE001
            self._off.add(name)
            logger.warning("%s of %s is switched off: %s: %s", name, self.run_dir, type(error).__name__, error)
            return False
        return True


def console_line(step: int, metrics: Mapping[str, Any]) -> str:
    """Write the metrics of one step as `step=12 reward=0.512 ...`, four digits to a number."""
    parts = [f"step={step}"]
    for name, value in metrics.items():
        number = _plain_number(value)
        parts.append(f"{name}={number:.4g}" if isinstance(number, float) else f"{name}={number}")
    return " ".join(parts)


def write_config(run_dir: Path, config: Any) -> None:
    """Write config.yaml, with keys and tokens hidden."""
    _write_whole(run_dir / "config.yaml", yaml.safe_dump(redact(config), sort_keys=False, allow_unicode=True))


def write_environment(run_dir: Path) -> None:
    """Write environment.json: what else the result depends on."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    environment = {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "packages": versions,
    }
    _write_whole(run_dir / "environment.json", json.dumps(environment, indent=2) + "\n")


# -- the summary --------------------------------------------------------------------------------------------


def open_run_folder(run_dir: str | Path) -> Path:
    """Make the folder of a new run; returns its absolute path.

    Raises:
        ValueError: it cannot be made, or it holds the steps of an earlier run, which a new one would write over.
    """
    folder = Path(run_dir).expanduser().resolve()
    metrics = folder / "metrics.jsonl"
    if metrics.is_file() and metrics.stat().st_size:
        raise ValueError(f"run_dir={run_dir} holds a run already; name another folder, or remove that one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run_dir={run_dir} cannot be made ({error.strerror}); name another folder") from error
    return folder


def empty_summary(recipe: str | None, seed: int | None) -> dict[str, Any]:
    """Give the summary of a run that has done nothing yet."""
    return {
        "recipe": recipe,
        "status": "running",
        "steps": 0,
        "seed": seed,
        "score": None,
        "seconds": {"setup": None, "warm_start": None, "to_first_step": None, "training": None},
        "peak_memory_bytes": None,
        "tokens_per_second": None,
        "error": None,
    }


def read_summary(run_dir: str | Path) -> dict[str, Any] | None:
    """Read summary.json; None when there is none."""
    try:
        return json.loads((Path(run_dir) / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def finish_summary(run_dir: str | Path, status: Status, error: str | None = None, **fields: Any) -> None:
    """Close summary.json, well or badly; the driver calls this when the trainer is gone.

    Args:
        run_dir: the run's folder; made if missing.
        status: how the run ended.
        error: the last line of what went wrong.
        fields: further fields, as of `Tracker.update_summary`; give `recipe` and `seed` in case the run ended
            before a tracker wrote them.
    """
    if status not in ("finished", "failed", "stopped"):
        raise ValueError(f"status={status!r} is no way for a run to end; use 'finished', 'failed' or 'stopped'")
    _check_fields(fields)
    message = None if error is None else _hide_in_text(error)
    try:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        _merge_summary(Path(run_dir), {**fields, "status": status, "error": message})
    except OSError as problem:
        logger.warning("summary.json of %s could not be written: %s", run_dir, problem)


def _begin_summary(run_dir: Path, recipe: str, seed: int, *, keep: bool) -> None:
    # The driver may have noted how long the warm start took; what an earlier run left here is another matter.
    before = read_summary(run_dir)
    if before is not None and not keep and before["status"] != "running":
        (run_dir / "summary.json").unlink()
    _merge_summary(run_dir, {"recipe": recipe, "seed": seed, "status": "running", "error": None})


def _merge_summary(run_dir: Path, fields: Mapping[str, Any]) -> None:
    summary = read_summary(run_dir) or empty_summary(None, None)
    for name, value in fields.items():
        both = isinstance(value, Mapping) and isinstance(summary[name], Mapping)
        summary[name] = {**summary[name], **value} if both else value
    text = json.dumps(_finite(summary)[0], indent=2, default=_plain_number)
    _write_whole(run_dir / "summary.json", text + "\n")


def _check_fields(fields: Mapping[str, Any]) -> None:
    known = empty_summary(None, None)
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ValueError(f"summary.json has no field {', '.join(unknown)}; it has {', '.join(known)}")


# -- sinks --------------------------------------------------------------------------------------------------


class _JsonLines:
    """One JSON object per step; every line is whole once `log` returns."""

    def __init__(self, path: Path, resume_step: int) -> None:
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= resume_step]
        _write_whole(path, "".join(line + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        finite, nonfinite = _finite(metrics)
        record = {**finite, "step": step, "time": round(time.time(), 3)}
        # Python would write NaN, which is no JSON and breaks every other reader.
        if nonfinite:
            record["nonfinite"] = nonfinite
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _Wandb:
    """W&B, online where there is a key and somebody answers, else offline in the run folder."""

    def __init__(self, run_dir: Path, config: Any, options: WandbConfig) -> None:
        import wandb
        import wandb.errors

        mode = os.environ.get("WANDB_MODE")
        if mode is None:
            mode = "online" if options.key or _has_wandb_key() else "offline"
            if mode == "offline":
                logger.warning(
                    "no W&B key found (WANDB_API_KEY or netrc): this run is kept offline in %s; "
                    "`wandb sync` sends it later",
                    run_dir / "wandb",
                )

        def start(mode: str) -> Any:
            settings = wandb.Settings(silent=True, console="off", init_timeout=options.init_timeout)
            if options.key:
                settings.api_key = options.key
            return wandb.init(
                dir=str(run_dir),
                project=options.project,
                entity=options.org,
                group=options.group,
                name=options.run_name or run_dir.resolve().name,
                config=config,
                mode=mode,  # pyright: ignore[reportArgumentType]
                settings=settings,
            )

        try:
            self._run = start(mode)
        except wandb.errors.Error as error:
            if mode != "online":
                raise
            logger.warning("W&B does not answer (%s); this run is kept offline in %s", error, run_dir / "wandb")
            self._run = start("offline")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urllib.parse.urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _write_rollouts(run_dir: Path, step: int, batch: Batch) -> None:
    import pyarrow.parquet

    path = run_dir / "rollouts" / f"step_{step:06d}.parquet"
    aside = path.with_name(f".{path.name}.partial")
    pyarrow.parquet.write_table(batch.to_table(), aside)
    aside.replace(path)


def _whole_lines(path: Path) -> list[str]:
    """Read the lines of a metrics file, without one that a killed process left half-written at the end."""
    if not path.exists():
        return []
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def _write_whole(path: Path, text: str) -> None:
    """Replace a file in one step, so that no reader meets half of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _plain_number(value: Any) -> Any:
    """Turn a tensor or array of one number into the number; anything that is none into text."""
    if hasattr(value, "item"):
        value = value.item()
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _finite(metrics: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replace NaN and infinities by None, at any depth, and list the top-level names that had one."""

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: clean(inner) for name, inner in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    cleaned = {name: clean(value) for name, value in metrics.items()}
    return cleaned, [name for name, value in metrics.items() if cleaned[name] is None and value is not None]


# -- what must not be written -------------------------------------------------------------------------------


def redact(config: Any) -> Any:
    """Copy a configuration as plain dicts, lists and scalars, with keys, tokens and passwords hidden.

    What hides a value is its name (`wandb.key`, `HF_TOKEN`, `api_key`, `use_wandb` unless it is a switch), the
    same in a text `name=value` or after `--name` in a list, or its own look (`hf_...`, a login in a URL). Names
    such as `input_key` or `max_tokens` are no secrets.
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {str(name): _hide_named(str(name), value) for name, value in config.items()}
    if isinstance(config, (list, tuple, set, frozenset)):
        return _redact_list(list(config))
    if config is None or isinstance(config, (bool, int, float)):
        return config
    return _hide_in_text(str(config))


def _hide_named(name: str, value: Any) -> Any:
    holds_text = isinstance(value, str) and value.lower() not in _SWITCHES
    return HIDDEN if holds_text and _is_secret(name) else redact(value)


def _redact_list(items: list[Any]) -> list[Any]:
    """Redact a list, which may be a command line: `--name value`, `--name=value` and `name=value`."""
    result: list[Any] = []
    previous = ""
    for item in items:
        name, equals, value = item.partition("=") if isinstance(item, str) else ("", "", "")
        if equals and _is_secret(name.lstrip("-")) and value.lower() not in _SWITCHES:
            result.append(f"{name}={HIDDEN}")
        else:
            result.append(_hide_named(previous.removeprefix("--") if previous.startswith("--") else "", item))
        previous = item if isinstance(item, str) else ""
    return result


def _is_secret(name: str) -> bool:
    if name.replace("-", "_").lower().endswith("use_wandb"):
        return True
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(name.replace("-", "_"))


def _hide_in_text(text: str) -> str:
    return _URL_LOGIN.sub(HIDDEN, _SECRET_VALUE.sub(HIDDEN, text))
