"""The memory plan as text: columns of the table of roles, and the paragraphs below it."""

from __future__ import annotations

from collections.abc import Iterable

from plugins.plan.arithmetic import amount_if
from plugins.plan.collect import RunMemory
from plugins.plan.pools import MemoryPool, memory_pools
from plugins.plan.remedies import remedy

COLUMNS = ("weights", "gradients", "optimizer", "cache", "passes", "base", "host")
"""Parts of an estimate, in the order of the columns."""
_HEADS = {"gradients": "grads", "optimizer": "optim"}
_UNKNOWN = (
    "? marks numbers that depend on a model, or on the memory of a GPU, that is not known here; of a model, a folder "
    "with its config.json is enough"
)


def format_bytes(count: int | None) -> str:
    """Return a number of bytes in decimal units: `1.6 MB`, `?` for None, `-` for 0."""
    if not count:
        return "?" if count is None else "-"
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    value, unit = next((count / size, unit) for size, unit in units if count >= 0.9995 * size or unit == "kB")
    return f"{value:,.0f} {unit}" if value >= 99.5 else f"{value:.2g} {unit}"


def columns(run: RunMemory) -> dict[str, list[str]]:
    """Return the columns of the table, by heading. Each column has one cell per role."""
    estimates = run.estimates.values()
    cells = {
        _HEADS.get(name, name): [format_bytes(getattr(estimate, name)) for estimate in estimates] for name in COLUMNS
    }
    return {**cells, "each": [format_bytes(estimate.total) for estimate in estimates]}


def paragraphs(run: RunMemory) -> list[tuple[str, str]]:
    """Return the texts below the table, each with its heading."""
    texts = [("memory", text) for text in _pool_texts(run, memory_pools(run))]
    if sends := _sends_text(run):
        texts.append(("sends", sends))
    if not run.is_known:
        texts.append(("unknown", _UNKNOWN))
    return texts


def _pool_texts(run: RunMemory, pools: Iterable[MemoryPool]) -> list[str]:
    texts = []
    for pool in pools:
        text = f"{pool.name}: {'at most' if run.is_known else 'as far as known'} {format_bytes(pool.most)}"
        # A single phase would only repeat the total.
        if len(pool.phases) > 1:
            text += f" ({', '.join(f'{name} {format_bytes(count)}' for name, count in pool.phases.items())})"
        texts.append(f"{text}, {capacity_text(run, pool)}")
    if run.capacity.is_guess:
        texts.append("the memory of other machines is assumed to be like this one's; --assume_devices plans for others")
    return texts


def capacity_text(run: RunMemory, pool: MemoryPool) -> str:
    """Return the size of a pool, the verdict, and the options to set."""
    if pool.available is None:
        return f"its size is not known: set {_assumption(run, pool)}"
    text = f"it has {format_bytes(pool.available)}: {pool.verdict}"
    if pool.verdict == "not known":
        return f"{text}, because the size of a model is not known"
    return text if pool.verdict == "fits" else f"{text}, {remedy(run, pool)}"


def _assumption(run: RunMemory, pool: MemoryPool) -> str:
    """Return an example of `--assume_devices` that makes the size of a pool known."""
    text = f"--assume_devices={amount_if(run.has_gpus, run.job.device_per_node)}x{run.job.node_num}"
    # 80 GB is an example of a common GPU, if this one's memory is not known.
    if run.has_gpus and run.job.device_per_node > 0:
        text += f"x{(run.capacity.device or 80 * 10**9) // 10**9}GB"
    return f"{text}x1000GB" if pool.is_machine else text


def _sends_text(run: RunMemory) -> str:
    """Return the bytes that ranks of trained models send to each other, as text, or an empty string."""
    texts = [
        f"{role.lower()} {', '.join(f'{format_bytes(count)} ({axis})' for axis, count in estimate.sends.items())}"
        for role, estimate in run.estimates.items()
        if estimate.sends
    ]
    return f"{'; '.join(texts)}: maximum that one rank sends to others in an optimizer step" if texts else ""
