"""Writes the page on which each option stands beside its names elsewhere, from training/options/synonyms.yaml.

python scripts/option_names_page.py            write docs/option_names.md
python scripts/option_names_page.py --check    exit 1 if it is not what would be written
"""

import sys
from collections.abc import Sequence

from migration_page import ROOT, current, names, table  # which makes the project importable

from training.options.synonyms import synonyms

PAGE = "docs/option_names.md"
HEAD = """\
# Names of options

<!-- Written by scripts/option_names_page.py from training/options/synonyms.yaml: change that, not this page. -->

After this page you can find an option by its name in TRL, OpenRLHF, verl or elsewhere. If you use one of these names in
a command, the error message gives the name to use here. [openrlhf_ppo](from_openrlhf.md) and [verl_ppo](from_verl.md)
accept the names of their own systems. [options.md](options.md) and `--help` have the meaning of each option.
"""


def page() -> str:
    """docs/option_names.md."""
    found = synonyms()
    options = [
        (f"`{option}`", names(known), ", ".join(found.elsewhere(option)[1]) or "all")
        for option, known in found.options.items()
    ]
    advice = [(names(each.names), each.say, f"`{each.where}`" if each.where else "all") for each in found.advice]
    lines = [
        HEAD,
        "## One option",
        "",
        *table(("here", "elsewhere", "recipes"), options),
        "",
        "## No option, or several",
        "",
        *table(("elsewhere", "here", "recipes with"), advice),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Write the page, or see whether it is up to date."""
    if "--check" not in arguments:
        (ROOT / PAGE).write_text(page(), encoding="utf-8")
    elif current(PAGE) != page():
        print(f"{PAGE}: not up to date; run python scripts/option_names_page.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
