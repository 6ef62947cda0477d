"""Writes the pages that say what becomes of another system's command line, from the schema of the recipe that takes it.

python scripts/migration_page.py            write docs/from_*.md
python scripts/migration_page.py --check    exit 1 if one of them is not what would be written
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from core import options_of  # noqa: E402 (the project may not be installed)
from recipes.openrlhf_ppo import flags  # noqa: E402
from recipes.openrlhf_ppo.config import RECIPE, PPOConfig  # noqa: E402

FROM_OPENRLHF = """\
# From OpenRLHF

<!-- Written by scripts/migration_page.py from config.py and flags.yaml of the recipe: change those, not this page. -->

Take the flags of your `train_ppo_ray` command as they are:

```bash
ray job submit ... -- python3 -m openrlhf.cli.train_ppo_ray --pretrain M --reward_pretrain R --prompt_data D ...
bash recipes/openrlhf_ppo/run.sh                            --pretrain M --reward_pretrain R --prompt_data D ...
```

`run.sh` starts Ray on this machine, or joins the cluster that `RAY_ADDRESS` names. Flags may be written `--flag value`
or `flag=value`, under the names of OpenRLHF 0.9 (and of its published guides) or under the dotted ones of 0.10 and
later. A flag that is not taken is never ignored: it ends the command with exit code 2 and one line that says why and
what to use. One that has no effect beside the others, such as a budget of tokens without `use_dynamic_batch`, is named
at the start. `--dry_run` shows the plan and starts nothing.

What is different on purpose:

- **Losses** are means over the tokens of a whole optimizer step on all ranks; micro-batch sizes and the number of ranks
  change memory and speed, never the result.
- **GAE and returns skip what the policy did not write.** Rewards are compared within a prompt's answers by the prompt's
  id, not by their place in the batch.
- **seq-mask-tis** cuts its weights to the range too; there the cut is forgotten. docs/algorithms.md lists every
  formula, and every place where it differs.
- **Dynamic filtering** replaces prompts one for one. When the data ends, the last step trains on what was accepted;
  the learning rate's schedule is of the steps that all prompts would fill.
- **The engine's weights** (`enable_vllm_is_correction`) are applied with every `policy_loss_type`; there with ppo
  alone.
- **dr_grpo** divides by `generate_max_len`, as its paper does; there it is the group's mean alone.
- **Reward servers** get batches of `remote_rm_batch_size` answers, spread over all URLs; a request that fails is
  tried again with growing pauses, and after five times the run stops and names the server.
- **Reward code** runs in processes of its own, with a deadline. An answer whose reward cannot be computed is named,
  counted (`reward/failed`) and gets 0; above a tenth of a batch (and two answers) the run stops.
- **Contradictions are errors**, not corrections: a discount with `rloo`, a critic's option without a critic, one answer
  per prompt where answers are compared.
- **Output** goes to `run_dir`: metrics, rollouts, logs, the trained policy, and the best one by `eval_dataset`.
"""


def cell(text: object) -> str:
    """A text as one cell of a table."""
    return str(text).replace("|", "\\|").replace("\n", " ")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(map(cell, line))} |" for line in lines]


def names(keys: Sequence[str]) -> str:
    """Flags in code type."""
    return ", ".join(f"`{key}`" for key in keys)


def shown_default(name: str, value: object, others: Mapping[str, str]) -> str:
    """A default, and the other system's where it is another."""
    # A default that is made when the run starts is another one every time.
    text = "auto" if value is None and name in others else "none" if value in (None, "") else str(value)
    text = f"runs/{RECIPE}-TIME" if name == "run_dir" else text
    return f"{text} (there: {others[name]})" if name in others else text


def from_openrlhf() -> str:
    """docs/from_openrlhf.md."""
    newer: dict[str, list[str]] = {}
    for other, flat in flags.ALIASES.items():
        newer.setdefault(flat, []).append(other)
    options = options_of(PPOConfig)
    rows = [
        (f"`{o.name}`", names(newer.get(o.name, [])), shown_default(o.name, o.default, flags.OTHER_DEFAULTS), o.meaning)
        for o in options
    ]
    taken = [row for row, option in zip(rows, options, strict=True) if option.name not in flags.OURS]
    ours = [(row[0], row[2], row[3]) for row, option in zip(rows, options, strict=True) if option.name in flags.OURS]
    refused = [
        (names([name for name, _ in group]), why + (f" (`{harmless}` is let through)" if harmless else ""))
        for (why, harmless), group in groupby(flags.REFUSED.items(), key=lambda item: (item[1].why, item[1].harmless))
    ]
    later = [(which, why.removeprefix(flags.NOT_YET)) for which, why in refused if why.startswith(flags.NOT_YET)]
    never = [(which, why) for which, why in refused if not why.startswith(flags.NOT_YET)]
    lines = [
        FROM_OPENRLHF,
        f"## Flags that work ({len(taken)})",
        "",
        *table(("flag", "also", "default", "what it does here"), taken),
        "",
        f"## Flags that are not here yet ({sum(which.count('`') // 2 for which, _ in later)} names)",
        "",
        "Naming one is an error, unless it asks for what happens anyway, such as `--packing_samples false`.",
        "",
        *table(("flags", "until then"), later),
        "",
        f"## Flags that are not taken ({sum(which.count('`') // 2 for which, _ in never)} names)",
        "",
        *table(("flags", "why, and what to use"), never),
        "",
        "## Options that OpenRLHF does not have",
        "",
        *table(("option", "default", "what it does"), ours),
    ]
    return "\n".join(lines) + "\n"


PAGES = {"docs/from_openrlhf.md": from_openrlhf}


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or see whether they are up to date."""
    stale = [name for name, page in PAGES.items() if "--check" in arguments and current(name) != page()]
    if stale:
        print(f"{', '.join(stale)}: not up to date; run python scripts/migration_page.py", file=sys.stderr)
        return 1
    if "--check" not in arguments:
        for name, page in PAGES.items():
            (ROOT / name).parent.mkdir(exist_ok=True)
            (ROOT / name).write_text(page(), encoding="utf-8")
    return 0


def current(name: str) -> str:
    """The page as it is; empty when it is not there."""
    path = ROOT / name
    return path.read_text(encoding="utf-8") if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
