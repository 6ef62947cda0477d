"""What a run will use, before anything starts: processes, devices, memory and steps, as a table and as JSON.

Nothing here needs torch.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from components.data.sources import DEFAULT_ROWS, is_drawn
from components.generate.choice import attention_note
from core import Job
from core.placement import detect_devices
from core.plan import HostPlan
from plugins.plan.machines import assumed, is_here, node_lines, nodes_of, ranges
from plugins.plan.memory import PROCESS_BYTES, Need, phases
from training.launch.launch import printed, threads_text
from training.tracking import redact
from training.tracking.environment import output_of
from training.tracking.serialization import flat

WIDTH = 100
_COLUMNS = ("weights", "gradients", "optimizer", "cache", "passes", "base", "host")
_HEADS = {"gradients": "grads", "optimizer": "optim"}
_NOT_OF_THE_RUN = ("run_dir", "dry_run", "assume_devices", "print_config")
_ON_GPU = {"zero_stage": 3, "adam_offload": True}
_ON_HOST = ("adam_offload", "engines_sleep", "learners_sleep")
_CHECKPOINTING = {"gradient_checkpointing": True}
_SHARES = ("gpu_memory",)
_PARALLEL = ("tensor_parallel",)
_PROCESSES = ("ranks", "ranks_per_node", "references", "rewards", "engines", "devices_per_node")
_BUDGETS = ("max_tokens",)
VERDICTS = ("fits", "not known", "maybe too much", "too much")
"""On a node or a device, the worse ones last. What is too much in any case is refused."""
_COUNTED_BYTES = 64_000_000
"""Of a file whose lines are counted before a run starts, at most."""


@dataclass(frozen=True)
class Capacity:
    """Bytes that there are; None: not known."""

    machine: int | None = None
    device: int | None = None
    is_guess: bool = False
    """The run is on other machines too, which are taken to be like this one."""

    @classmethod
    def here(cls, gpus: object, nodes: int = 1) -> Capacity:
        """Of this machine, or what its control group allows, and of each of its GPUs. The others of a cluster are taken
        to be like it; of machines that are assumed only what was said is known.
        """
        if machines := assumed():
            return cls(machines.host_bytes, machines.device_bytes if gpus else None)
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
        for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
            text = Path(path).read_text(encoding="utf-8").strip() if Path(path).is_file() else ""
            limits += [int(text)] if text.isdecimal() else []
        visible, order = os.environ.get("CUDA_VISIBLE_DEVICES", ""), os.environ.get("CUDA_DEVICE_ORDER")
        # CUDA's numbers are nvidia-smi's where both count by the bus.
        named = visible and (order == "PCI_BUS_ID" or not visible[0].isdecimal())
        device = gpu_bytes(visible if named else "") if gpus else None
        return cls(min(limits), device, is_guess=nodes > 1 or not is_here())


@functools.cache
def gpu_bytes(names: str) -> int | None:
    """Of each of these GPUs, of all by default; None: not known, or not alike."""
    chosen = [f"--id={names}"] if names else []
    shown = output_of("nvidia-smi", *chosen, "--query-gpu=memory.total", "--format=csv,noheader,nounits") or ""
    sizes = {int(line) * 2**20 for line in shown.split() if line.isdecimal()}
    return sizes.pop() if len(sizes) == 1 else None


@dataclass(frozen=True)
class Place:
    """What shares one memory."""

    name: str
    certain: Mapping[str, int]
    """Bytes of each role that it takes in any case."""
    least: int
    """Of all together at the same time, in any case."""
    most: int
    there: int | None
    processes: Mapping[str, int] | None = None
    """Of each role on a machine; None: it is a GPU."""
    phases: Mapping[str, int] = field(default_factory=dict)
    """The most in each phase of a step."""
    is_known: bool = True
    """False where the size of a model in it is not known, so that it may hold more."""

    @property
    def verdict(self) -> str:
        """Whether it fits: one of `VERDICTS`."""
        if self.there is None:
            return "not known"
        if self.least > self.there:
            return "too much"
        if not self.is_known:
            return "not known"
        return "maybe too much" if self.most > self.there else "fits"


@dataclass(kw_only=True)
class Plan:
    """What a run will use, and why."""

    recipe: str
    job: Job
    config: Any
    """With everything filled in that was left to the machine."""
    changed: Mapping[str, Any]
    """Options that are not at their defaults, by dotted name."""
    needs: Mapping[str, Need]
    """Of a process of each role that holds a model."""
    steps: str
    """The arithmetic of the run, or why it is not known yet."""
    choices: Sequence[str]
    """Engines and precision, and the reasons."""
    notes: Sequence[str] = ()
    step_count: int | None = None
    """Steps of the run; None: not known before the data are read."""
    overlaps: bool = False
    """Roles work at the same time."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Models that this machine lacks, by option, with the reason."""
    capacity: Capacity | None = None
    """Default: what there is here."""

    def __post_init__(self) -> None:
        self.job.check_backend(self.config.backend)
        self.nodes = nodes_of(self.job)
        self.there = self.capacity or Capacity.here(self.job.device_type == "GPU", self.job.node_num)
        options = {name: value for name, value in self.changed.items() if name not in _NOT_OF_THE_RUN}
        self.changed = redact(options)
        self.needs = {role: self.needs.get(role, Need()) for role in self.job.placement.processes}

    def json(self) -> str:
        """plan.json: the job, and what the table says."""
        own = json.loads(self.job.model_copy(update={"config": redact(self.config)}).model_dump_json())
        memory = [
            {"role": role, "processes": self._count(role)}
            | {name: getattr(need, name) for name in _COLUMNS}
            | {"total": need.total if need.is_known else None, "sends": need.sends}
            for role, need in self.needs.items()
        ]
        places = [
            {"place": p.name, "least": p.least, "most": p.most, "phases": p.phases, "there": p.there}
            | {"verdict": p.verdict}
            for p in self._places()
        ]
        return json.dumps(
            own
            | {"assumed": str(assumed() or "") or None, "nodes": node_lines(self.job, self.nodes)}
            | {"verdicts": self.verdicts(), "idle_nodes": max(self._idle_nodes(), 0), "absent": dict(self.absent)}
            | {"changed": self.changed, "memory": memory, "places": places, "arithmetic": self.steps},
            indent=2,
        )

    def print_config(self, asked: Any, given: Collection[str]) -> None:
        """Print the configuration, and the notes on stderr.

        Args:
            asked: the configuration before anything was filled in.
            given: the options that the user has named.
        """
        print(printed(asked, given))
        self._info(self.notes)

    def check_and_show(self, always: bool = False) -> None:
        """Check the memory. The table goes to stderr where a run cannot fit, or always.

        Raises:
            ValueError: as `check`.
        """
        try:
            self.check()
        except ValueError:
            self._info(self.lines())
            raise
        if always:
            self._info(self.lines())

    def _info(self, lines: Iterable[str]) -> None:
        for line in lines:
            print(f"{self.recipe}: {line}", file=sys.stderr)

    def check(self) -> None:
        """See that what is certain fits: weights, gradients, optimizer states, and caches that are taken at once. On
        other machines than this one, whose memory nobody has said, only the GPUs count.

        Raises:
            ValueError: it does not; the message says what to set.
        """
        for role, need in self.needs.items():
            if need.short:
                raise ValueError(
                    f"it cannot fit: {role}'s engine may take {amount(need.share)} of a GPU, and needs "
                    f"{amount(need.share + need.short)} for its weights, its context and one sequence; "
                    f"{self._larger_share(need)}"
                )
        for place in self._places():
            is_guess = self.there.is_guess and place.processes is not None
            if place.verdict != "too much" or is_guess:
                continue
            role = max(place.certain, key=lambda name: place.certain[name])
            need = self.needs[role]
            shown = {name: getattr(need, name) for name in ("weights", "gradients", "optimizer", "cache")}
            if need.grows:
                del shown["cache"]
            if place.processes is not None and self.job.placement.devices[role]:
                shown = {"offloaded or asleep": need.host, "moving average on the first": need.first}
            parts = ", ".join(f"{name} {amount(value)}" for name, value in shown.items() if value)
            raise ValueError(
                f"it cannot fit: {place.name} would hold {amount(place.least)}, and has {amount(place.there)}. The "
                f"most is {role}'s, {(place.processes or self.job.placement.processes)[role]} x ({parts}); "
                f"{self._remedy(place, role)}"
            )

    def lines(self) -> list[str]:
        """The plan for a person."""
        machines = assumed()
        found = [f"assumed   {machines}, not this one"] if machines else []
        places = self._places()
        found += [*self._table(), *self._nodes(), *self._sums(places)]
        parts = {
            "steps": self.steps,
            "sends": self._sent(),
            "with": "; ".join(self.choices),
            "changed": self._changed(),
        }
        if not all(need.is_known for need in self.needs.values()):
            parts["unknown"] = (
                "? where the sizes of a model, or the memory of a GPU, are not known here; for a model a folder with "
                "its config.json is enough"
            )
        for name, text in parts.items():
            found += self._wrapped(name, text) if text else []
        if (idle := self._idle_nodes()) > 0:
            text = f"{idle} of {idle + self.job.node_num} machines: set placement.nodes={idle + self.job.node_num}"
            found += self._wrapped("idle", f"{text} to use them all")
        for option, why in self.absent.items():
            found += self._wrapped("absent", f"{option}: {why}; a run needs it")
        return found + list(self.notes)

    def _idle_nodes(self) -> int:
        """Return the number of assumed machines that the run does not use."""
        machines = assumed()
        return (machines.nodes or 0) - self.job.node_num if machines else 0

    @property
    def _width(self) -> int:
        return WIDTH - len(self.recipe) - 2

    def _wrapped(self, head: str, text: str) -> list[str]:
        return textwrap.wrap(f"{head:<10}{text}", self._width, subsequent_indent=" " * 10)

    def _count(self, role: str) -> int:
        return self.job.placement.processes[role]

    def _table(self) -> list[str]:
        threads = {role: host.threads for host in self.job.placement.hosts for role, _ in host.workers}
        rows = []
        for role, need in self.needs.items():
            device = self.job.placement.devices[role] / self._count(role)
            what = f"{device:.2g} GPU" if device else threads_text(threads[role])
            cells = [amount(getattr(need, name)) for name in _COLUMNS]
            rows.append([role.lower(), f"{self._count(role)} x {what}", *cells, amount(need.total)])
        heads = [f"on {self.job.device_type}", "processes", *(_HEADS.get(name, name) for name in _COLUMNS), "each"]
        kept = [i for i in range(len(heads)) if i < 2 or any(row[i] != "-" for row in rows)]
        table = [[row[i] for i in kept] for row in [heads, *rows]]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        gap = "  " if sum(widths) + 2 * len(widths) <= self._width else " "
        return [
            gap.join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
            for row in table
        ]

    def _sent(self) -> str:
        """What ranks of a model that is trained send each other."""
        found = [
            f"{role.lower()} {', '.join(f'{amount(count)} ({axis})' for axis, count in need.sends.items())}"
            for role, need in self.needs.items()
            if need.sends
        ]
        return f"{'; '.join(found)}: one rank to others, in an optimizer step, at most" if found else ""

    def verdicts(self) -> dict[str, str]:
        """Of each node, the worst of its memory and its GPUs."""
        places, found = self._places(), dict[str, str]()
        devices = [place for place in places if place.processes is None]
        for node in range(self.job.node_num):
            roles = {role for host in self._hosts_on(node) for role, _ in host.workers}
            own = [self._machine(node), *(place for place in devices if roles & place.certain.keys())]
            found[f"node {node + 1}"] = max((place.verdict for place in own), key=VERDICTS.index)
        return found

    def _nodes(self) -> list[str]:
        """What is on which node, and whether it fits, where there are several."""
        if self.job.node_num == 1 and not assumed():
            return []
        found, verdicts = list[str](), self.verdicts().values()
        for line in map("; ".join, zip(node_lines(self.job, self.nodes), verdicts, strict=True)):
            found += self._wrapped("" if found else "nodes", line)
        return found

    def _sums(self, places: Iterable[Place]) -> list[str]:
        found = []
        most = "at most" if all(need.is_known for need in self.needs.values()) else "as far as known"
        for place in places:
            text = f"{place.name}: {most} {amount(place.most)}"
            if len(place.phases) > 1:
                text += f" ({', '.join(f'{name} {amount(count)}' for name, count in place.phases.items())})"
            found += self._wrapped("memory", f"{text}, {self._has(place)}")
        if self.there.is_guess:
            text = "the memory of other machines is taken to be like this one's; --assume_devices plans for others"
            found += self._wrapped("", text)
        return found

    def _has(self, place: Place) -> str:
        """What there is, and the verdict; with what to set, or how to get one."""
        if place.there is None:
            return f"what it has is not known: set {self._to_say(place)}"
        found = f"it has {amount(place.there)}: {place.verdict}"
        if place.verdict == "not known":
            return f"{found}, as the size of a model is not"
        return found if place.verdict == "fits" else f"{found}, {self._remedy(place)}"

    def _to_say(self, place: Place) -> str:
        """An option with which it would be known."""
        gpus = self.job.device_per_node if self.job.device_type == "GPU" else 0
        host = "x1000GB" * (place.processes is not None)
        device = f"x{(self.there.device or 80 * 10**9) // 10**9}GB" * (gpus > 0)
        return f"--assume_devices={gpus}x{self.job.node_num}{device}{host}"

    def _changed(self) -> str:
        text = " ".join(f"{name}={_short(value)}" for name, value in self.changed.items())
        return textwrap.shorten(text, 2 * (self._width - 10) - 20, placeholder=f" ... ({len(self.changed)} in all)")

    def _places(self) -> list[Place]:
        """A GPU of each group of roles that share one, and each machine; those that are alike are one."""
        found = list[Place]()
        on_gpu = [role for role in self.needs if self.job.placement.devices[role]]
        groups = [[role for role in group if role in on_gpu] for group in self.job.collocations]
        groups += [[role] for role in on_gpu if not any(role in group for group in groups)]
        for group in filter(None, groups):
            needs = [self.needs[role] for role in group]
            base, found_phases = sum(need.base for need in needs), phases(needs)
            certain = {role: self.needs[role].certain for role in group}
            found.append(
                Place(
                    f"a GPU of {' + '.join(group)}",
                    certain,
                    least=max(phase.certain for phase in found_phases),
                    most=base + max(phase.most for phase in found_phases),
                    there=self.there.device,
                    phases={phase.name: base + phase.most for phase in found_phases},
                    is_known=all(need.is_known for need in needs),
                )
            )
        machines: dict[tuple[int, int], list[int]] = {}
        places = [self._machine(node) for node in range(self.job.node_num)]
        for node, place in enumerate(places):
            if not place.processes:
                continue
            machines.setdefault((place.least, place.most), []).append(node + 1)
        for alike in machines.values():
            name = f"node {alike[0]}" if len(alike) == 1 else f"each of nodes {ranges(alike)}"
            name = name if self.job.node_num > 1 or assumed() else "this machine"
            found.append(replace(places[alike[0] - 1], name=name))
        return found

    def _hosts_on(self, node: int) -> list[HostPlan]:
        return [host for host in self.job.placement.hosts if self.nodes[host.bundle] == node]

    def _machine(self, node: int) -> Place:
        """The memory of one machine; the first has the driver."""
        hosts = self._hosts_on(node)
        workers = [worker for host in hosts for worker in host.workers]
        counts = Counter(role for role, _ in workers)
        devices = self.job.placement.devices
        base = {role: PROCESS_BYTES["process"] if devices[role] else need.base for role, need in self.needs.items()}
        # In local mode all is in one process, which is the driver's.
        bases = [max((base[role] for role, _ in host.workers), default=0) for host in hosts]
        driver = PROCESS_BYTES["driver"] * (node == 0)
        most = max(bases) if self.config.backend == "local" else driver + sum(bases)
        certain, turns = dict[str, int](), [0]
        for role, need in self.needs.items():
            on_gpu, is_first = devices[role] > 0, (role, 0) in workers
            certain[role] = counts[role] * (need.host if on_gpu else need.certain) + need.first * is_first
            most += certain[role] + need.published * is_first
            turns.append(0 if on_gpu else counts[role] * need.brief)
        working = sum(turns) if self.overlaps else max(turns)
        loading = sum(counts[role] * need.loading for role, need in self.needs.items())
        # All roles load at the same time.
        now = {"start": most + loading, "work": most + working}
        shown = {name: count for name, count in now.items() if count > most} if loading else {}
        sums, there = (sum(certain.values()), max(now.values())), self.there.machine
        # A model of unknown size may be offloaded, asleep or loading here, also where it runs on a GPU.
        is_known = all(self.needs[role].weights is not None for role in counts)
        return Place("", certain, *sums, there, counts, shown, is_known)

    def _remedy(self, place: Place, role: str = "") -> str:
        """What to set, of the options of this recipe; with a role, so that it takes less in any case."""
        gpu, here = self.job.device_type == "GPU", place.processes is not None
        needs = [self.needs[name] for name in ([role] if role else place.certain)]
        learns = any(need.optimizer != 0 or (need.host and not need.cache) for need in needs)
        caches = any(need.cache and not need.grows for need in needs)
        weights = (needs[0].weights or 0) * (place.processes or {role: 1})[role] if role else 0
        better: dict[str, object] = {} if role else dict(_CHECKPOINTING)
        lower = _BUDGETS * (not role)
        if learns and weights < (place.there or 0):
            better["lora_rank"] = 16
        if here and gpu:
            better, lower = dict[str, object](dict.fromkeys(_ON_HOST, False)), ()
        elif gpu:
            better, lower = better | (_ON_GPU if learns else {}), lower + _SHARES * caches
        else:
            lower += ("cpu_cache_gb",) * caches
        found = list[str]()
        parts = [part for need in needs for part in need.parts or (need,)]
        cuts = gpu and not here and any(p.weights and not (p.optimizer or p.host or p.generates) for p in parts)
        layout = "sharded" if max(self._count(name) for name in place.certain) > 1 else "offloaded"
        for name, value in flat(redact(self.config)).items():
            last = name.rpartition(".")[2]
            if cuts and (last, value) == ("frozen_models", "whole"):
                found.insert(0, f"{name}={layout}")
            if last in better and value in (0, 1, 2) and value != better[last]:
                found.append(f"{name}={_short(better[last])}")
                continue
            if here and name == "train.ema_beta" and value is not None:
                found.append(f"{name}=null")
            fewer = here and not gpu and last.endswith(_PROCESSES) and (value or 0) > 1
            if fewer or (last in lower and (value is not None or last in _SHARES)):
                found.append(f"{name} lower")
        return self._or_smaller(found[:4] + ["more GPUs"] * (gpu and not here))

    def _larger_share(self, need: Need) -> str:
        """What to set where an engine may not take what its weights do. Where it trains too it has one device."""
        fits = need.share + need.short <= (self.there.device or 0)
        wanted = _SHARES * fits + _PARALLEL * (not need.optimizer)
        names = [name for name in flat(redact(self.config)) if name.rpartition(".")[2] in wanted]
        return self._or_smaller([f"{name} higher" for name in names])

    def _or_smaller(self, found: Sequence[str]) -> str:
        options = flat(redact(self.config))
        models = [name for name, value in options.items() if name == "model.path" and value]
        return f"set {', '.join([*found, ''])}{'or ' * bool(found)}a smaller model ({(models or ['the model'])[0]})"


def amount(count: int | None) -> str:
    """Bytes for a person, in decimal units: `1.6 MB`, `?` for what is not known, `-` for nothing."""
    if not count:
        return "?" if count is None else "-"
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    value, unit = next((count / size, unit) for size, unit in units if count >= 0.9995 * size or unit == "kB")
    return f"{value:,.0f} {unit}" if value >= 99.5 else f"{value:.2g} {unit}"


def _short(value: Any) -> str:
    """A value as it would be written on a command line, cut."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return text if len(text) <= 40 else f"{text[:37]}..."


def steps_text(arithmetic: Callable[[int], str], source: str, most: int | None, probs: str | None = None) -> str:
    """The arithmetic of a run over the rows of a source, where these are counted quickly.

    Args:
        arithmetic: of so many rows.
        source: as a recipe is given it.
        most: rows that are used, at most; None: all.
        probs: of a mixture, which repeats rows.
    """
    counts = [_count_rows(name.strip(), most) for name in source.split(",")]
    if None in counts or (probs and most is None):
        return f"not known before {source} is read"
    total = sum(count or 0 for count in counts)
    return arithmetic(total if most is None else min(total, most))


def _count_rows(name: str, most: int | None) -> int | None:
    path = Path(name).expanduser()
    if is_drawn(name):
        return DEFAULT_ROWS if most is None else most
    try:
        if path.suffix == ".jsonl" and path.is_file() and path.stat().st_size <= _COUNTED_BYTES:
            with path.open("rb") as file:
                return sum(1 for line in file if line.strip())
        if path.suffix == ".parquet" and path.is_file():
            from pyarrow.parquet import read_metadata

            return read_metadata(path).num_rows
    except (OSError, ValueError):  # reading it will say why
        return None
    return None


def attention_notes(asked: str | None) -> list[str]:
    """What is to be said of attention that is not the one asked for."""
    note = attention_note(asked, detect_devices())
    return [f"model.{note}"] if note else []
