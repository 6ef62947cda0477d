"""Write docs/from_openrlhf.md and docs/from_verl.md from the adapters and the schemas of the recipes.

python scripts/migration_page.py            write docs/from_*.md
python scripts/migration_page.py --check    exit with 1 if a page is not up to date
"""

import sys
import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from plugins.openrlhf.adapter import train_ppo  # noqa: E402
from recipes.openrlhf_ppo.config import PPOConfig  # noqa: E402
from recipes.verl_ppo.adapter import VERL  # noqa: E402
from recipes.verl_ppo.config import VerlPPOConfig  # noqa: E402
from training.options.adapter import Adapter, Refused  # noqa: E402
from training.options.schema import options_of  # noqa: E402 (the project may not be installed)

FROM_OPENRLHF = """\
# From OpenRLHF

<!-- Written by scripts/migration_page.py from plugins/openrlhf/openrlhf.yaml and the recipe's config.py: change those,
not this page. -->

After this page you can run your `train_ppo_ray` command here. Take it as it is:

```bash
ray job submit ... -- python3 -m openrlhf.cli.train_ppo_ray --pretrain M --reward_pretrain R --prompt_data D ...
bash recipes/openrlhf_ppo/run.sh                            --pretrain M --reward_pretrain R --prompt_data D ...
```

`run.sh` starts Ray on this machine, or joins the cluster that `RAY_ADDRESS` names. The flags of 0.8.11 to 0.11.2 are
taken, the flat ones (`--actor_learning_rate`) and the dotted ones (`--actor.adam.lr`), as `--flag value` or
`flag=value`, beside the options of this project (`train.learning_rate`). `--print_config` prints the options that a
command comes to, and `--dry_run` shows the plan; both start nothing.

A flag is never ignored in silence. One that is not taken ends the command with exit code 2 and the option to use; all
that is in the way is reported at once. One that has no effect, alone or beside the others, is named at the start.

What takes more than another name:

- **`max_len`** is the limit of prompt and response together. With `max_new_tokens` prompts have what is left; without
  it a response gets what its prompt leaves (`agent.max_tokens`). Prompts that are too long are left out and counted;
  there they lose their beginning. An episode of an agent has `max_len` tokens, or `prompt_max_len` and
  `generate_max_len` together.
- **Rewards** come from the first of `agent_func_path`, `remote_rm_url` and `reward_pretrain` that is given.
- **`ROLE_num_nodes` x `ROLE_num_gpus_per_node`** are the workers of a role (`placement.actor_ranks` and so on). Reward
  code and servers take no device.
- **`colocate_all_models`** with `async_train` is for all models but the engines, as there.
- **`dynamic_filtering`** with `partial_rollout`: new weights wait until responses are done.
- **`vllm_enable_sleep`** has an effect where engines share devices, and is the default there.
- **`use_dynamic_batch`** cuts by `train_max_tokens_per_gpu`; the micro-batch sizes have no effect then, as there.
- **`enable_vllm_is_correction`** with `use_icepop` or `vllm_is_correction_type` is `algorithm.correction`. One number
  as `vllm_is_truncated_threshold` is the highest weight, as up to 0.9.0. Of 0.11.2, `is_correction_level` token with
  `is_correction_mode` clip is `tis`, with mask `icepop`, and seq is `seq-mask`; `is_correction_gating` is always ratio.
- **`algo.advantage.estimator flash_reinforce`** is one line in a copy of recipes/grpo with `samples_per_prompt=1`:
  `advantage_B = reward_B - reward_B.mean()`.
- **`eps_clip`**, **`eps_clip_low_high`** are `algorithm.clip_low` and `clip_high`; **`enable_ema`**, **`ema_beta`** are
  `train.ema_beta`; **`lr_scheduler`** takes transformers' names; `linear` ends at 0 and `constant` has no warm-up.
- **`use_wandb`** and **`use_tensorboard`** take a key and a folder, or `true`.

What is different on purpose:

- **Losses** are means over the tokens of a whole optimizer step on all ranks; micro-batch sizes and the number of ranks
  change memory and speed, never the result.
- **GAE and returns skip what the policy did not write.** Rewards are compared within a prompt's responses by the
  prompt's id, not by their place in the batch.
- **seq-mask-tis** cuts its weights to the range too; there the cut is forgotten. docs/algorithms.md lists every
  formula, and every place where it differs.
- **Dynamic filtering** replaces prompts one for one. When the data ends, the last step trains on what was accepted;
  the learning rate's schedule is of the steps that all prompts would fill.
- **The correction** of the engine's weights is applied with every `policy_loss_type`; there with ppo alone.
- **dr_grpo** is the group's mean alone, as there; `algorithm.loss_aggregation=seq-mean-token-sum-norm` divides by
  `rollout.max_new_tokens` besides, as its paper does.
- **Reward servers** get batches of `reward.url_batch_size` responses, spread over all URLs; a request that fails is
  tried again with growing pauses, and after five times the run stops and names the server. Nothing is lost: once the
  server is back, the same command resumes from there.
- **Reward code** runs in processes of its own, with a deadline. A response whose reward cannot be computed is named,
  counted (`reward/failed`) and left out; above a tenth of a batch (and two responses) the run stops.
- **Output** goes to `run_dir`: metrics, rollouts, logs, the trained policy, and the best one by `eval_dataset`.
"""

FROM_VERL = """\
# From verl

<!-- Written by scripts/migration_page.py from verl.yaml of the recipe: change that, not this page. -->

After this page you can run your `main_ppo` command here. Take its overrides as they are, of any release from 0.5.0 on:

```bash
python3 -m verl.trainer.main_ppo  algorithm.adv_estimator=grpo data.train_files=... actor_rollout_ref.model.path=...
bash recipes/verl_ppo/run.sh      algorithm.adv_estimator=grpo data.train_files=... actor_rollout_ref.model.path=...
```

`run.sh` starts Ray on this machine, or joins the cluster that `RAY_ADDRESS` names. `+key=value` and `++key=value` mean
`key=value`. A YAML file of verl's, its own `ppo_trainer.yaml` too, is read with `--config FILE`: `${...}` is resolved
as Hydra does it, with the command line's values; files that `defaults` names are not read.

Every key stands for an option that all recipes here share (`--help all` prints them), and both names work, also side by
side. A key that is not taken is never ignored: the command ends with exit code 2 and every reason at once, each with
what to use. One that changes no results is named at the start. `--dry_run` shows the plan and starts nothing.

Batch sizes are verl's: `data.train_batch_size` and `ppo_mini_batch_size` count prompts, over all ranks;
`..._micro_batch_size_per_gpu` count sequences on one. The options count responses: `train.mini_batch_size` is
`ppo_mini_batch_size` times `rollout.n`. The start of a run shows what that comes to.

What is different on purpose:

- **Losses** are means over the tokens (or responses) of a whole optimizer step on all ranks; micro-batch sizes and the
  number of ranks change memory and speed, never what a mini-batch comes to. A mini-batch divides a step.
- **`policy_loss.loss_mode`**: gspo, sapo and geo_mean are means over responses whatever `loss_agg_mode` is, as there
  (`algorithm.policy_aggregation`); `loss_agg_mode` is for entropy and KL then. With `bypass_mode` the loss is that of
  `rollout_correction.loss_type` whatever `loss_mode` is, as there. A line at the start names both.
- **`grad_clip`** limits gradients where `optim.clip_grad` is not set, as up to 0.6; later ones read the latter alone.
- **`optimal_token_baseline`** compares responses after as many tokens of the policy, so that with an environment in
  between it is `tir_optimal_token_baseline`; there it counts the environment's tokens too. The start of a run notes it.
- **`trainer.ref_update_freq`** of the spin recipe has no effect: the reference stays the policy of the start.
- **Speculative decoding** and other arguments of `engine_kwargs` that change speed alone are taken and have no effect.
- **Epochs**: prompts at the end of one that fill no step begin the next one's first step; there they are dropped.
- **`balance_batch`** is always on, and changes no mini-batch; there which responses are in which changes with the
  number of ranks.
- **fsdp and fsdp2** are the same: torch's fully_shard. `param_offload`, `optimizer_offload` and `offload_policy` are
  one thing, and hold for weights, gradients and optimizer states while the policy trains.
- **Precision**: without `model_dtype` it is bfloat16 with float32 master weights where there are GPUs; `fp32` is what
  it is there: float32 weights, and matrix products in bfloat16 unless `fsdp_config.dtype=float32`. On a CPU `fp32` is
  float32 throughout.
- **`ulysses_sequence_parallel_size`** is `parallel.context`, one number for actor and critic; models that are not
  trained compute whole sequences. **`fsdp_size`** spreads what the plan shows otherwise. Results are the same.
- **LoRA** with a KL: the policy with its adapters off is the reference, as there, and no second model is loaded.
- **`ref.fsdp_config.param_offload`** shards the reference and keeps it in host memory, and with it the reward model;
  without it each process has them whole, and `placement.frozen_models=sharded` is what fsdp does there.
- **The hybrid engine** has an engine of its own in each process. With `tensor_model_parallel_size` above 1 the engines
  are processes of their own, `rollout`, each on the devices of as many ranks of `actor` on its node.
- **`clip_ratio`** holds for both sides where `clip_ratio_low` and `clip_ratio_high` are not set; there these two have
  defaults, and win.
- **`lr_warmup_steps`** counts steps of the run, as there; all optimizer steps of one have the same learning rate.
- **`critic_warmup`** has no effect without a critic; there the policy would wait all the same.
- **`rollout_correction`** takes rejected tokens out of the loss; their responses count among those to their prompt.
- **KL estimates** are kept within 10 nats, k1 and k2 too. docs/algorithms.md lists every formula, and every place where
  it differs. `actor/ppo_kl` is the k3 estimate, never negative; there it is the mean log-ratio.
- **Reward functions** run in processes of their own, with a deadline. A response whose reward cannot be computed is
  named, counted and left out of baseline and loss; above a tenth of a batch the run stops. Reward models are
  classifiers with the policy's vocabulary, run by transformers; with `reward_model.function_weight` the function's
  score is added.
- **A reward model beside a function** (`custom_reward_function.path`), with keys of 0.7 or later
  (`reward_model.rollout`, `reward.reward_model`), is a model that the function asks: the function alone gives the
  reward, you serve the model by `vllm serve`, and `custom_reward_function.reward_kwargs` passes its address.
- **Validation** is sampled with `val_kwargs`, greedy unless `do_sample` or `val_kwargs.temperature` is set; at the
  start and the end the run's own score is taken at temperature 1 from all tokens, and greedy, which makes three
  passes. `test_freq=-1` still validates at the end. Its responses are not kept.
- **Dynamic sampling** (`algorithm.filter_groups`) replaces prompts one for one, until the step is full or the data
  ends.
- **Rows** for an agent or with tools are an error without `agent.func_path` or a file of tools.
- **Tools** of `multi_turn.tool_config_path` are run as in verl's agent loop: each call creates, executes and releases
  an instance of its tool, and the reward function scores the whole episode, with `num_turns` in `extra_info`. Here a
  call that cannot be read, or is one too many, gets an error that the policy reads. `calc_reward` and the rewards of
  `execute` are logged, as `tool_score` and `tool_reward`. Files of tools may import `BaseTool` and the schemas of
  `verl.tools` where verl is not installed. Functions of `multi_turn.function_tool_path` are tools too.
- **Interactions** of `multi_turn.interaction_config_path` follow each response without a call as the user.
  `extra_info.interaction_kwargs` of a row names one; with a single interaction it may be left out. Rewards of turns are
  logged as `turn_score`. Verl's `Gsm8kInteraction` is here, with sentences of its own.
- **Checkpoints** hold all of actor and critic, and a folder that `from_pretrained` loads; the last three stay, and the
  best one. `save_freq=-1` still writes the best and the last.
- **`resume_mode=auto`** resumes from what is in `run_dir`, whose name carries the time unless you give it: to continue,
  name the folder. There it is `default_local_dir`, named after project and experiment.
- **Output** goes to `run_dir`: metrics, rollouts, logs, the trained policy.
"""


def cell(text: object) -> str:
    """Return a text as one cell of a Markdown table. A word in <> outside of code is escaped: it is not HTML."""
    parts = str(text).replace("|", "\\|").replace("\n", " ").split("`")
    parts[::2] = [part.replace("<", "&lt;").replace(">", "&gt;") for part in parts[::2]]
    return "`".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    all_rows = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(map(cell, row))} |" for row in all_rows]


def names(keys: Sequence[str]) -> str:
    """Return flags as inline code, separated by commas."""
    return ", ".join(f"`{key}`" for key in keys)


def shown_default(name: str, value: object, others: Mapping[str, str]) -> str:
    """Return the text of a default value, with that of the other system in parentheses if it differs."""
    text = str(value)
    if value in (None, ""):
        text = "none"
    if value is None and name in others:
        text = "auto"
    if name == "run_dir":
        # Its default contains the start time, which would change the page on every run.
        folder, _, run = text.rpartition("/")
        text = f"{folder}/{run.partition('-')[0]}-TIME"
    if name in others:
        text += f" (there: {others[name]})"
    return text


def reason(entry: Refused) -> str:
    """Return why a flag is refused or has no effect, with the value that is accepted."""
    if not entry.harmless:
        return entry.why
    return f"{entry.why} (`{entry.harmless}` is let through)"


def adapter_tables(schema: Any, adapter: Adapter, system: str) -> list[str]:
    """Return the tables of an adapter as Markdown, and a table of the options that have no name in the other system.

    Args:
        schema: options of the recipe.
        adapter: names of the other system.
        system: name of the other system.
    """
    options = options_of(schema)
    other: dict[str, list[str]] = {}
    for name, target in adapter.options.items():
        other.setdefault(target.name, []).append(name)
    rows = [
        (f"`{o.name}`", names(other.get(o.name, [])), shown_default(o.name, o.default, {}), o.meaning) for o in options
    ]
    named = [row for row, option in zip(rows, options, strict=True) if option.name in other]
    rest = [(row[0], row[2], row[3]) for row, option in zip(rows, options, strict=True) if option.name not in other]
    lines = [
        f"## Names that stand for an option ({len(adapter.options)})",
        "",
        *table(("option", f"in {system}", "default", "what it does here"), named),
        "",
        f"## Names from which options are computed ({len(adapter.computed)})",
        "",
        textwrap.fill(f"{names(list(adapter.computed))}.", 120, break_long_words=False, break_on_hyphens=False),
    ]
    for title, head, entries in (
        ("Names without effect", "why", adapter.no_effect),
        ("Names that are not taken", "why, and what to use", adapter.refused),
    ):
        by_why: dict[str, list[str]] = {}
        for name, entry in entries.items():
            by_why.setdefault(reason(entry), []).append(name)
        rows = [(names(group), why) for why, group in by_why.items()]
        lines += ["", f"## {title} ({len(entries)})", "", *table(("names", head), rows)]
    return [*lines, "", f"## All other options ({len(rest)})", "", *table(("option", "default", "what it does"), rest)]


def from_openrlhf() -> str:
    """Return the text of docs/from_openrlhf.md."""
    return "\n".join([FROM_OPENRLHF, *adapter_tables(PPOConfig, train_ppo(), "OpenRLHF")]) + "\n"


def from_verl() -> str:
    """Return the text of docs/from_verl.md."""
    defaults = {option.name: option.default for option in options_of(VerlPPOConfig)}
    taken = [
        (
            f"`{key}`",
            f"`{target.name}`",
            shown_default(target.name, defaults[target.name], {}),
            ", ".join(f"{verl}: {ours}" for verl, ours in target.values.items() if verl != str(ours)),
        )
        for key, target in VERL.options.items()
    ]

    def grouped(part: Mapping[str, Refused]) -> list[tuple[str, str]]:
        """Return (keys, reason) per run of neighbours with the same reason. Keys without a reason are left out."""
        rows = groupby(part.items(), key=lambda item: reason(item[1]) if item[1].why else "")
        return [(names([name for name, _ in group]), text) for text, group in rows if text]

    lines = [
        FROM_VERL,
        f"## Keys that are an option ({len(taken)})",
        "",
        *table(("key", "option", "default", "values"), taken),
        "",
        f"## Keys that come to one together with others ({len(VERL.computed)})",
        "",
        "`*` stands for any part of a name.",
        "",
        *table(("keys",), [(f"`{key}`",) for key in VERL.computed]),
        "",
        "## Keys without effect",
        "",
        "They steer how verl goes about something that is done otherwise here; whatever they are, the result stays.",
        "",
        *table(("keys", "why"), grouped(VERL.no_effect)),
        "",
        "## Keys that are not taken",
        "",
        *table(("keys", "why, and what to use"), grouped(VERL.refused)),
    ]
    return "\n".join(lines) + "\n"


PAGES = {"docs/from_openrlhf.md": from_openrlhf, "docs/from_verl.md": from_verl}


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or with --check compare them with the current tables. Return the exit code."""
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
    """Return the text of a page, or "" if it does not exist."""
    path = ROOT / name
    if not path.is_file():
        return ""
    return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
