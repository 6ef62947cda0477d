"""How far apart each comparison may be, and the page that is written of how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from importlib.metadata import version

from steps import ROOT, Apart

PAGE = ROOT / "docs" / "differences.md"
MOST = Apart(advantages=2e-5, losses=5e-6, gradients=5e-5, weights=2e-3)
"""Of what is rounding alone. Adam divides gradients by their own size, so that what is only rounding in one that is
nearly 0 is a share of the learning rate in its weight."""
HEAD = """\
# Differences

<!-- Written by scripts/oracle.sh --write from what tests/oracle measures: change those, not this page. -->

After this page you know how closely the numbers of a run here follow those of OpenRLHF, TRL and verl.

How far apart `recipes/verl_ppo` and the real verl are, `recipes/openrlhf_ppo` and the real OpenRLHF, `recipes/grpo`,
`dpo`, `reward_model` and `sft` and the real TRL: the same keys, flags or settings, data, rewards and starting weights
on both sides, a model made on the spot, three training steps on a CPU in float32 (of two mini-batches each with verl
and OpenRLHF, and there of two micro-batches). Read it before you bring a run here, or compare two curves.

Advantages are absolute, of all tokens and steps the largest difference; losses too, above 1 as a share of theirs;
gradients are norms, as a share of theirs; weights as a share of how far the weight that moved the most has moved in
three steps. `0` is less than 1e-9. Adam divides each gradient by its own size, so that rounding in a gradient that is
nearly 0 shows in weights; its epsilon is 1e-6 on both sides.

`bash scripts/oracle.sh` makes the packages' environment and measures all of it again; it fails where two that are to
agree do not, or where two that are expected to differ agree. What differs on purpose, formula by formula, is in
[algorithms.md](algorithms.md#where-this-differs-from-openrlhf-and-verl) and [From
TRL](from_trl.md#what-differs-from-trl-by-default).
"""


class Differences:
    """Rows of the page, in the order in which they were measured."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, tuple[Apart, str]]] = {}

    def hold(self, package: str, name: str, apart: Apart, why: str = "") -> None:
        """Keep a row. AssertionError if the two are not as near as rounding, or with a reason `why`, if they are."""
        self.rows.setdefault(package, {})[name] = apart, why
        pairs = zip(astuple(apart), astuple(MOST), strict=True)
        beyond = [a is not None and not a <= most for a, most in pairs]
        assert any(beyond) == bool(why), f"{package}, {name}: {apart}; {why or 'rounding'}"

    def write(self) -> None:
        """The page."""
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
    """One digit is what another machine would also have."""
    if x is None:
        return "-"
    return "0" if x < 1e-9 else f"{x:.0e}".replace("e-0", "e-").replace("e+00", "")
