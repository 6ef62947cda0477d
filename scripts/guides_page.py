"""Write docs/guides.md from the tables of tests/guides.

python scripts/guides_page.py            write docs/guides.md
python scripts/guides_page.py --check    exit with 1 if the page is not up to date
"""

import csv
import sys
from collections.abc import Sequence

from migration_page import ROOT, current, table  # also makes the project importable

PAGE = "docs/guides.md"
GUIDES = {
    "multi_role_openrlhf": "DLRover: multi-role jobs, OpenRLHF's PPO",
    "multi_role_verl": "DLRover: multi-role jobs, verl's PPO",
    "rl_sdk": "DLRover: RL integration SDK",
    "verl_ppo_architecture": "verl: PPO example architecture",
    "openrlhf_agent_training": "OpenRLHF: agent-based training",
}
"""Table in tests/guides -> title of the guide."""
HEAD = """\
# The published guides

<!-- Written by scripts/guides_page.py from tests/guides/*.csv: change those, not this page. -->

After this page you know which items of five published guides work here unchanged. Only import lines change:
`dlrover...` becomes `core`, `verl...` becomes `recipes.verl_ppo.ray_trainer`, `openrlhf.utils.agent` becomes `agents`.
The last column of each table names the test that runs the item, in `tests/guides/test_<guide>.py`.
"""


def page() -> str:
    """Return the text of docs/guides.md."""
    counts: list[tuple[object, ...]] = []
    parts: list[str] = []
    for name, title in GUIDES.items():
        with (ROOT / "tests" / "guides" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        statuses = [row["status"] for row in rows]
        holds = statuses.count("holds")
        counts.append(
            (
                f"[{title}](#{name.replace('_', '-')})",
                len(rows),
                holds,
                statuses.count("other spelling"),
                statuses.count("refused with replacement"),
            )
        )
        items = [(row["item"], row["status"], row["note"], f"`{row['test']}`") for row in rows]
        parts += ["", f"## {name.replace('_', ' ')}", "", f"{title}. {holds} of {len(rows)} items hold as written.", ""]
        parts += table(("item", "status", "note", "test"), items)
    head = table(("guide", "items", "hold", "hold with another spelling", "refused, naming a replacement"), counts)
    return "\n".join([HEAD, *head, *parts]) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Write the page, or with --check compare it with the current tables. Return the exit code."""
    if "--check" not in arguments:
        (ROOT / PAGE).write_text(page(), encoding="utf-8")
    elif current(PAGE) != page():
        print(f"{PAGE}: not up to date; run python scripts/guides_page.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
