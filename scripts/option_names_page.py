"""Write docs/option_names.md, the names of each option in other systems, from plugins/option_help/synonyms.yaml.

python scripts/option_names_page.py            write docs/option_names.md
python scripts/option_names_page.py --check    exit with 1 if the page is not up to date
"""

import sys
from collections.abc import Sequence

from migration_page import ROOT, current, names, table  # also makes the project importable

from plugins.option_help.synonyms import synonyms

PAGE = "docs/option_names.md"
HEAD = """\
# Names of options

<!-- Written by scripts/option_names_page.py from plugins/option_help/synonyms.yaml: change that, not this page. -->

After this page you can find an option by its name in TRL, OpenRLHF, verl or elsewhere. If you use one of these names in
a command, the error message gives the name to use here. [openrlhf_ppo](from_openrlhf.md) and [verl_ppo](from_verl.md)
accept the names of their own systems. [options.md](options.md) and `--help` have the meaning of each option.
"""


def page() -> str:
    """Return the text of docs/option_names.md."""
    known = synonyms()
    options = [
        (f"`{option}`", names(others), ", ".join(known.elsewhere(option)[1]) or "all")
        for option, others in known.options.items()
    ]
    advice = []
    for hint in known.advice:
        recipes = "all"
        if hint.where:
            recipes = f"`{hint.where}`"
        advice.append((names(hint.names), hint.say, recipes))
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
    """Write the page, or with --check compare it with the current table. Return the exit code."""
    if "--check" not in arguments:
        (ROOT / PAGE).write_text(page(), encoding="utf-8")
    elif current(PAGE) != page():
        print(f"{PAGE}: not up to date; run python scripts/option_names_page.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
