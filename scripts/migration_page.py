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
from training.options.described import options_of  # noqa: E402
from training.options.table_adapter import Refused, TableAdapter  # noqa: E402

FROM_OPENRLHF = """\
# From OpenRLHF

<!-- Written by scripts/migration_page.py from plugins/openrlhf/openrlhf.yaml and the recipe's config.py: change those,
not this page. -->

After this page you can run your `train_ppo_ray` command here. The flags stay the same:

```bash
ray job submit ... -- python3 -m openrlhf.cli.train_ppo_ray --pretrain M --reward_pretrain R --prompt_data D ...
bash recipes/openrlhf_ppo/run.sh                            --pretrain M --reward_pretrain R --prompt_data D ...
```

`run.sh` starts Ray on this machine, or joins the cluster of `RAY_ADDRESS`. It accepts the flags of versions 0.8.11 to
0.11.2, flat (`--actor_learning_rate`) and dotted (`--actor.adam.lr`), as `--flag value` or `flag=value`, and the
options of this project (`train.learning_rate`). `--print_config` prints the resulting options, and `--dry_run` prints
the plan; neither starts anything.

The command may also be pasted as it is, with its launcher and program: `bash recipes/openrlhf_ppo/run.sh ray job submit
... -- python3 -m openrlhf.cli.train_ppo_ray ...`. The same holds for `train_sft` (recipes/sft), `train_dpo` and
`train_kto` (recipes/dpo) and `train_rm` (recipes/reward_model); `serve_rm` is `python -m recipes.reward_model.serve`.
`train_prm`, `train_kd`, `train_opd`, `batch_inference`, `interactive_chat` and `lora_combiner` are refused with what to
use instead.

A flag is never ignored silently. If a flag is not supported, the command ends with exit code 2, and the error names the
option to use for every such flag. A flag that has no effect, alone or in combination, is printed at start-up.

Flags that change more than their name:

- **`max_len`** limits prompt and response together. With `max_new_tokens` it limits the prompt to the rest. Without
  it, it limits the response to the tokens that the prompt leaves (`agent.max_tokens`). Longer prompts are excluded and
  counted; OpenRLHF truncates them on the left. An episode of an agent has `max_len` tokens, or the sum of
  `prompt_max_len` and `generate_max_len`.
- **Rewards** come from the first of `agent_func_path`, `remote_rm_url` and `reward_pretrain` that is set.
- **`ROLE_num_nodes` x `ROLE_num_gpus_per_node`** is the number of workers of a role (`placement.actor_ranks` and
  others). Reward code and servers use no device.
- **`colocate_all_models`** with `async_train` applies to all models except the engines, as in OpenRLHF.
- **`dynamic_filtering`** with `partial_rollout`: new weights are loaded after the responses are complete.
- **`vllm_enable_sleep`** has an effect if engines share devices, where it is the default.
- **`use_dynamic_batch`** forms micro-batches by `train_max_tokens_per_gpu`. The micro-batch sizes then have no effect,
  as in OpenRLHF.
- **`enable_vllm_is_correction`** with `use_icepop` or `vllm_is_correction_type` is `algorithm.correction`. A single
  number for `vllm_is_truncated_threshold` is the maximum weight, as up to 0.9.0. In 0.11.2, `is_correction_level` token
  with `is_correction_mode` clip is `tis`, with mask `icepop`; level seq is `seq-mask`; `is_correction_gating` is always
  ratio.
- **`algo.advantage.estimator flash_reinforce`** is one line in a copy of recipes/grpo with `samples_per_prompt=1`:
  `advantage_B = reward_B - reward_B.mean()`.
- **`eps_clip`**, **`eps_clip_low_high`** are `algorithm.clip_low` and `clip_high`. **`enable_ema`**, **`ema_beta`** are
  `train.ema_beta`. **`lr_scheduler`** takes the names of transformers; `linear` ends at 0 and `constant` has no
  warm-up.
- **`use_wandb`** and **`use_tensorboard`** take a key and a folder, or `true`.

Intended differences:

- **Losses** are means over the tokens of a whole optimizer step on all ranks. Micro-batch sizes and the number of ranks
  change memory and speed, not the result.
- **GAE and returns skip tokens that the policy did not write.** Rewards are compared within the responses to a prompt
  by the id of the prompt, not by their position in the batch.
- **seq-mask-tis** also clips its weights to the range; OpenRLHF discards the result of the clipping. docs/algorithms.md
  lists every formula and its differences.
- **Dynamic filtering** replaces prompts one by one. When the data ends, the last step trains on the accepted prompts.
  The learning rate schedule counts the steps that all prompts would fill.
- **The correction** of the engine's log-probabilities applies to every `policy_loss_type`; in OpenRLHF to ppo only.
- **dr_grpo** only subtracts the mean of the group, as in OpenRLHF. `algorithm.loss_aggregation=seq-mean-token-sum-norm`
  also divides by `rollout.max_new_tokens`, as in the paper.
- **Reward servers** get batches of `reward.url_batch_size` responses, distributed over all URLs. A failed request is
  repeated after increasing pauses. After five attempts the run stops and names the server. Once the server works again,
  the same command resumes without losses.
- **Reward code** runs in separate processes, with a timeout. A response without a reward is named, counted
  (`reward/failed`) and excluded. If more than a tenth of a batch (and more than two responses) fail, the run stops.
- **Output** goes to `run_dir`: metrics, rollouts, logs, the trained policy, and the best policy by `eval_dataset`.
"""

FROM_VERL = """\
# From verl

<!-- Written by scripts/migration_page.py from verl.yaml of the recipe: change that, not this page. -->

After this page you can run your `main_ppo` command here. The overrides of all releases from 0.5.0 on stay the same:

```bash
python3 -m verl.trainer.main_ppo  algorithm.adv_estimator=grpo data.train_files=... actor_rollout_ref.model.path=...
bash recipes/verl_ppo/run.sh      algorithm.adv_estimator=grpo data.train_files=... actor_rollout_ref.model.path=...
```

`run.sh` starts Ray on this machine, or joins the cluster of `RAY_ADDRESS`. `+key=value` and `++key=value` mean
`key=value`, and `~key` means `key=null`. `--config FILE` reads a YAML file of verl, including `ppo_trainer.yaml`.
`${...}` is resolved as in Hydra, with the values of the command line. Files that are listed in `defaults` are not read.

Every key maps to an option that all recipes share (`--help all` prints them). You can use both names in one command. If
keys are not supported, the command ends with exit code 2, and the error gives the reason and the replacement of each. A
key that changes no results is printed at start-up, also if it is a setting within a feature (`*.megatron.*`,
`*.multi_turn.*`, `*.mtp.*`). `--dry_run` prints the plan and starts nothing.

The command may be pasted as it is, with its launcher and program: `bash recipes/verl_ppo/run.sh ray job submit ... --
python3 -m verl.trainer.main_ppo ...`. A trainer that is not here, such as `recipe.prime.main_prime`, is refused with
what to use instead. A reward file may import `verl.utils.reward_score` without verl.

Batch sizes are verl's: `data.train_batch_size` and `ppo_mini_batch_size` count prompts, over all ranks.
`..._micro_batch_size_per_gpu` counts sequences on one GPU. The options count responses: `train.mini_batch_size` is
`ppo_mini_batch_size` times `rollout.n`. The run prints the resulting sizes at start-up.

Intended differences:

- **Losses** are means over the tokens (or responses) of a whole optimizer step on all ranks. Micro-batch sizes and the
  number of ranks change memory and speed, not the result. A mini-batch must divide a step.
- **`policy_loss.loss_mode`**: gspo, sapo and geo_mean are means over responses for any `loss_agg_mode`, as in verl
  (`algorithm.policy_aggregation`); `loss_agg_mode` then holds for entropy and KL. With `bypass_mode` the loss is that
  of `rollout_correction.loss_type` for any `loss_mode`, as in verl. The run prints both at start-up.
- **`grad_clip`** limits gradients if `optim.clip_grad` is not set, as up to 0.6. Later releases only read
  `optim.clip_grad`.
- **`optimal_token_baseline`** compares responses after the same number of tokens of the policy. With an environment it
  is therefore `tir_optimal_token_baseline`; verl also counts the environment's tokens. The run prints a note at
  start-up.
- **`trainer.ref_update_freq`** of the spin recipe is `algorithm.reference_sync_steps`: the reference becomes a copy of
  the policy at this interval. The loss of the spin recipe itself is not here.
- **`distillation`**: one teacher, and the reverse KL of the sampled tokens as a policy gradient (`loss_mode=k1`,
  `use_policy_gradient=true`, without task rewards). Advantages are limited to 10 nats and computed once per step.
- **`rollout.quantization=fp8`** rounds the engine's weights to 8 bits. It requires a correction
  (`rollout_correction.rollout_is`), or `rollout.accept_bias=true`.
- **`async_training.use_rollout_log_probs`** without `compute_prox_log_prob` is `algorithm.bypass`: the policy before
  the step is the one that sampled the responses.
- **`model.lora`** (adapters in Megatron) is `train.lora_*`; layers that Megatron fuses have an adapter each.
- **`rollout.name`** sglang, sglang_async and trtllm are vllm, and naive is hf; **`strategy`** and `model_engine`
  megatron, veomni, torchtitan and automodel are torch's fully_shard with the same axes. `--dry_run` prints it.
  Arguments of the other engine have no effect, or are refused if they change the responses.
- **`engine_kwargs.vllm`**: the arguments in the table below are passed to vLLM. Others that only change speed, and
  speculative decoding, are accepted and have no effect.
- **Epochs**: prompts at the end of an epoch that fill no step are the first of the next epoch; verl drops them.
- **`balance_batch`** is always on, and does not change mini-batches. In verl the responses of a mini-batch depend on
  the number of ranks.
- **fsdp and fsdp2** are the same: torch's fully_shard. `param_offload`, `optimizer_offload` and `offload_policy` are
  one setting, for weights, gradients and optimizer states while the policy trains.
- **Precision**: without `model_dtype` it is bfloat16 with float32 master weights if there are GPUs. `fp32` means
  float32 weights, and matrix products in bfloat16 unless `fsdp_config.dtype=float32`, as in verl. On a CPU `fp32`
  computes everything in float32.
- **`ulysses_sequence_parallel_size`** is `parallel.context`, one number for actor and critic. Models that are not
  trained compute whole sequences. **`fsdp_size`** has no effect: models are sharded over all ranks of their role.
  Results are the same.
- **LoRA** with a KL: the policy with disabled adapters is the reference, as in verl. No second model is loaded.
- **`ref.fsdp_config.param_offload`** shards the reference and keeps it in host memory, and also the reward model.
  Without it each process holds the whole models. `placement.frozen_models=sharded` is the equivalent of fsdp in verl.
- **The hybrid engine** has one engine in each process. With `tensor_model_parallel_size` above 1 the engines are
  separate processes, `rollout`, each on the devices of as many ranks of `actor` on its node.
- **`clip_ratio`** holds for both sides if `clip_ratio_low` and `clip_ratio_high` are not set. In verl these two have
  defaults, which override it.
- **`lr_warmup_steps`** counts steps of the run, as in verl. All optimizer steps of a step have the same learning rate.
- **`critic_warmup`** has no effect without a critic. In verl the policy is not trained during these steps.
- **`rollout_correction`** removes rejected tokens from the loss. Their responses still count in the baseline of their
  prompt.
- **KL estimates** are clamped to 10 nats, including k1 and k2. docs/algorithms.md lists every formula and its
  differences. `actor/ppo_kl` is the k3 estimate, which is never negative; in verl it is the mean log-ratio.
- **Reward functions** run in separate processes, with a timeout. A response without a reward is named, counted and
  excluded from baseline and loss. If more than a tenth of a batch fails, the run stops. Reward models are classifiers
  with the policy's vocabulary, run by transformers. With `reward_model.function_weight` the score of the function is
  added.
- **A reward model with a function** (`custom_reward_function.path`), with keys of 0.7 or later
  (`reward_model.rollout`, `reward.reward_model`), is a model that the function calls: only the function returns the
  reward. Serve the model with `vllm serve`, and pass its address in `custom_reward_function.reward_kwargs`.
- **Validation** samples with `val_kwargs`, greedy unless `do_sample` or `val_kwargs.temperature` is set. At the start
  and the end the run also evaluates its own score, sampled at temperature 1 from all tokens, and greedy: three passes.
  `test_freq=-1` still validates at the end. The responses are not saved.
- **Dynamic sampling** (`algorithm.filter_groups`) replaces prompts one by one, until the step is full or the data
  ends.
- **Rows** for an agent or with tools are an error without `agent.func_path` or a file of tools.
- **Tools** of `multi_turn.tool_config_path` run as in verl's agent loop: each call creates, executes and releases an
  instance of its tool, and the reward function scores the whole episode, with `num_turns` in `extra_info`. A call that
  cannot be parsed, or that exceeds the limit, gets an error that the policy reads. `calc_reward` and the rewards of
  `execute` are logged as `tool_score` and `tool_reward`. Files of tools may import `BaseTool` and the schemas of
  `verl.tools` if verl is not installed. Functions of `multi_turn.function_tool_path` are also tools.
- **Interactions** of `multi_turn.interaction_config_path` act as the user after each response without a call.
  `extra_info.interaction_kwargs` of a row names the interaction; it is optional if there is only one. Rewards of turns
  are logged as `turn_score`. `Gsm8kInteraction` is included, with its own wording.
- **Checkpoints** contain the whole state of actor and critic, and a folder for `from_pretrained`. The last three and
  the best one are kept. `save_freq=-1` still writes the best and the last.
- **`resume_mode=auto`** resumes from `run_dir`. The default name contains the time; to continue a run, pass its folder.
  In verl it is `default_local_dir`, named after project and experiment.
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
    return f"{entry.why} (`{entry.harmless}` is accepted)"


def adapter_tables(schema: Any, adapter: TableAdapter, system: str) -> list[str]:
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
        f"## Names of options ({len(adapter.options)})",
        "",
        *table(("option", f"in {system}", "default", "meaning"), named),
        "",
        f"## Names from which options are computed ({len(adapter.computed)})",
        "",
        textwrap.fill(f"{names(list(adapter.computed))}.", 120, break_long_words=False, break_on_hyphens=False),
    ]
    for title, head, entries in (
        ("Names without effect", "reason", adapter.no_effect),
        ("Names that are not supported", "reason and replacement", adapter.refused),
    ):
        by_why: dict[str, list[str]] = {}
        for name, entry in entries.items():
            by_why.setdefault(reason(entry), []).append(name)
        rows = [(names(group), why) for why, group in by_why.items()]
        lines += ["", f"## {title} ({len(entries)})", "", *table(("names", head), rows)]
    return [*lines, "", f"## All other options ({len(rest)})", "", *table(("option", "default", "meaning"), rest)]


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
            # An entry of a mapping, as of rollout.vllm, has no default.
            shown_default(target.name, defaults.get(target.name), {}),
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
        f"## Keys of options ({len(taken)})",
        "",
        *table(("key", "option", "default", "values"), taken),
        "",
        f"## Keys from which options are computed ({len(VERL.computed)})",
        "",
        "`*` stands for any part of a name.",
        "",
        *table(("keys",), [(f"`{key}`",) for key in VERL.computed]),
        "",
        "## Keys without effect",
        "",
        "They control details of verl's implementation. Their values do not change the result.",
        "",
        *table(("keys", "reason"), grouped(VERL.no_effect)),
        "",
        "## Keys that are not supported",
        "",
        *table(("keys", "reason and replacement"), grouped(VERL.refused)),
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
