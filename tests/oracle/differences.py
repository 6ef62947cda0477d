"""Maximum difference of each comparison, and the page of measured differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from importlib.metadata import version

from steps import ROOT, Apart

PAGE = ROOT / "docs" / "differences.md"
MOST = Apart(advantages=2e-5, losses=5e-6, gradients=5e-5, weights=2e-3)
"""Maximum differences that rounding explains. Adam divides a gradient by its magnitude, so rounding of a gradient near
0 changes its weight by a fraction of the learning rate.
"""
HEAD = """\
# Differences

<!-- Written by scripts/oracle.sh --write from what tests/oracle measures: change those, not this page. -->

After this page you know how closely the numbers of a run here follow those of OpenRLHF, TRL and verl.

Read this page before you migrate a run, or compare two curves. The tables compare `recipes/verl_ppo` with verl,
`recipes/openrlhf_ppo` with OpenRLHF, and `recipes/grpo`, `dpo`, `reward_model` and `sft` with TRL. Both sides have the
same settings, data, rewards and initial weights of a small random model. They make three training steps on a CPU in
float32. With verl and OpenRLHF each step has two mini-batches of two micro-batches.

| column | difference |
|---|---|
| advantages | absolute; the maximum over all tokens and steps |
| losses | absolute; relative for losses above 1; the maximum over all steps |
| gradients | of norms, relative |
| weights | relative to the largest change of a weight in three steps |

`0` means less than 1e-9. Adam divides each gradient by its magnitude, so rounding of a gradient near 0 affects the
weights. Its epsilon is 1e-6 on both sides.

`bash scripts/oracle.sh` installs the packages and repeats all measurements. It fails if two results differ that should
agree, or agree that should differ. Intended differences are listed per formula in
[algorithms.md](algorithms.md#where-this-differs-from-openrlhf-and-verl) and [From
TRL](from_trl.md#what-differs-from-trl-by-default).
"""


class Differences:
    """Rows of the page, in the order in which they were measured."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, tuple[Apart, str]]] = {}

    def hold(self, package: str, name: str, apart: Apart, why: str = "") -> None:
        """Add a row. Raises AssertionError if the values differ by more than rounding, or, with a reason `why`, if they
        do not.
        """
        self.rows.setdefault(package, {})[name] = apart, why
        pairs = zip(astuple(apart), astuple(MOST), strict=True)
        beyond = [a is not None and not a <= most for a, most in pairs]
        assert any(beyond) == bool(why), f"{package}, {name}: {apart}; {why or 'rounding'}"

    def write(self) -> None:
        """Return the page."""
        parts = [HEAD]
        for package, rows in self.rows.items():
            parts += ["", f"## {package} {version(package)}", "", *table(rows)]
        PAGE.write_text("\n".join(parts) + "\n", encoding="utf-8")


def table(rows: Mapping[str, tuple[Apart, str]]) -> list[str]:
    head = "| what | advantages | losses | gradients | weights | why |"
    lines = [head, "|---|---|---|---|---|---|"]
    for name, (apart, why) in rows.items():
        numbers = " | ".join(shown(x) for x in astuple(apart))
        lines.append(f"| {name} | {numbers} | {why} |")
    return lines


def shown(x: float | None) -> str:
    """One digit, because only that is equal on other machines."""
    if x is None:
        return "-"
    return "0" if x < 1e-9 else f"{x:.0e}".replace("e-0", "e-").replace("e+00", "")
