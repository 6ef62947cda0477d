"""Table of vLLM's engine arguments, read from `arguments.yaml`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ALLOWED = "allowed"
CORRECTED = "corrected"
REFUSED = "refused"
SAMPLING = "sampling"
"""Classes of arguments; `arguments.yaml` explains them."""
TITLES = {
    ALLOWED: "allowed",
    CORRECTED: "with a correction",
    REFUSED: "refused",
    SAMPLING: "refused: sampling",
}
"""Class of arguments -> its name in the documentation."""


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One argument of vLLM."""

    kind: str
    """ALLOWED, CORRECTED, REFUSED or SAMPLING."""
    why: str
    """Effect of the argument, or the reason why it is refused."""
    values: tuple[Any, ...] = ()
    """Values that are passed on. Empty: all."""
    neutral: tuple[Any, ...] = ()
    """Values of a CORRECTED argument that change no log-probability."""
    cpu_values: tuple[Any, ...] = ()
    """Values that a run on CPUs passes on in spite of `gpu_only`."""
    gpu_only: str = ""
    """Reason why a run on CPUs refuses the argument. Empty if it does not."""


@functools.cache
def content() -> Mapping[str, Any]:
    """Return the content of `arguments.yaml`."""
    return yaml.safe_load(Path(__file__).with_name("arguments.yaml").read_text(encoding="utf-8"))


@functools.cache
def arguments() -> Mapping[str, Argument]:
    """Return all arguments by name."""
    table: dict[str, Argument] = {}
    for kind in TITLES:
        for entry in content()[kind]:
            argument = Argument(
                kind=kind,
                why=entry["why"],
                values=tuple(entry.get("values", ())),
                neutral=tuple(entry.get("neutral", ())),
                gpu_only=entry.get("gpu_only", ""),
                cpu_values=tuple(entry.get("cpu_values", ())),
            )
            table |= dict.fromkeys(entry["names"], argument)
    return table


def markdown() -> str:
    """Return the table of docs/engines.md."""
    lines = ["| class | arguments | effect, or reason |", "|---|---|---|"]
    for kind, title in TITLES.items():
        for entry in content()[kind]:
            names = ", ".join(f"`{name}`" for name in entry["names"])
            if "values" in entry:
                names += f" = {', '.join(f'`{value}`' for value in entry['values'])}"
            effect = entry["why"]
            if "gpu_only" in entry:
                effect += f". Refused on a CPU: {entry['gpu_only']}"
            lines.append(f"| {title} | {names} | {effect} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
