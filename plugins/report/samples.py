"""Read the rollouts of a run for its report: some steps, with complete groups and the text of every token.

Only pyarrow is used. Importing torch would take seconds, longer than writing the report.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plugins.report.gather import evenly, short

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_STEPS = 40
MIN_STEPS = 6
MAX_GROUPS = 12
MAX_IN_GROUP = 16
TOKENS_TO_READ = 600
"""Maximum number of tokens per response that determines the number of steps. Longer responses are cut instead of
reducing the number of steps further."""
BINS = 12
PER_TOKEN = ("logprob", "advantage", "reference_logprob", "value")
PER_SAMPLE = ("sample_id", "branch", "reward", "score", "shaped_reward", "status", "error", "weight_version")
AT_ONCE = 200
"""Number of tokens that are decoded in one stream. With bytes that never form a character, longer streams would become
slower and slower."""


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer in a folder, or None if there is none that can be read."""
    if not (folder / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    # The library raises a plain Exception for a file that it cannot parse. The report then shows ids instead of text.
    except Exception:  # noqa: BLE001
        return None


class Vocabulary:
    """The tokens of a page: id and text of each different token."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.entries: list[tuple[int, str]] = []
        self._tokenizer = tokenizer
        self._index: dict[tuple[int, str], int] = {}

    def indices(self, ids: Sequence[int]) -> list[int]:
        """Return the indices in `entries` of the tokens of a text.

        The text of a character that consists of several tokens belongs to the last of them.
        """
        places = []
        for entry in zip(ids, self._texts(ids)):
            if entry not in self._index:
                self._index[entry] = len(self.entries)
                self.entries.append(entry)
            places.append(self._index[entry])
        return places

    def _texts(self, ids: Sequence[int]) -> Iterator[str]:
        if self._tokenizer is None:
            yield from (f"{i} " for i in ids)
            return
        from tokenizers.decoders import DecodeStream

        for start in range(0, len(ids), AT_ONCE):
            # Special tokens are shown, because a reader looks for missing end tokens.
            stream = DecodeStream(skip_special_tokens=False)
            for i in ids[start : start + AT_ONCE]:
                yield (stream.step(self._tokenizer, i) or "")[:200]


def read_rollouts(run_dir: Path, most_tokens: int) -> dict[str, Any] | None:
    """Return steps, groups and responses of `run_dir/rollouts`, about `most_tokens` tokens in total, or None without
    files.

    The numbers of omitted parts are included: `of_steps`, and in each step `of`, `of_groups` and `cut`.
    """
    files = sorted((run_dir / "rollouts").glob("step_*.parquet"), key=lambda path: int(path.stem[5:] or 0))
    if not files:
        return None
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    vocabulary = Vocabulary(tokenizer)
    steps: list[dict[str, Any]] = []
    last = _read(files[-1], ("lengths", "prompt_id")) or {}
    count = MAX_STEPS
    if len(last.get("lengths", ())):
        group = min(MAX_IN_GROUP, len(last["lengths"]) / len(set(last.get("prompt_id", ())) or {0}))
        group_tokens = group * min(TOKENS_TO_READ, max(1.0, float(np.mean(last["lengths"]))))
        count = int(min(MAX_STEPS, max(MIN_STEPS, most_tokens // max(group_tokens, 1))))
    chosen = [files[i] for i in evenly(len(files), count)]
    for path in chosen:
        columns = _read(path)
        if columns and len(columns.get("lengths", ())) and "tokens" in columns:
            steps.append({"step": int(path.stem[5:]), **_step(columns, most_tokens // len(chosen), vocabulary)})
    return {
        "steps": steps,
        "of_steps": len(files),
        "unread": len(chosen) - len(steps),
        "has_text": tokenizer is not None,
        "vocabulary": vocabulary.entries,
    }


def _read(path: Path, only: Sequence[str] | None = None) -> dict[str, Any] | None:
    """Return the columns of a file, or None if it is damaged. Per-token columns are (values, offsets)."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with pa.OSFile(str(path)) as source:
            file = pyarrow.parquet.ParquetFile(source)
            names = only or (*_COLUMNS, *PER_TOKEN, *PER_SAMPLE)
            table = file.read([name for name in file.schema_arrow.names if name in names])
    except (pa.ArrowException, OSError):
        return None
    columns: dict[str, Any] = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if pa.types.is_large_list(column.type) or pa.types.is_list(column.type):
            columns[name] = _array(column.values), _array(column.offsets)
        elif pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
            columns[name] = _array(column)
        else:
            columns[name] = column.to_pylist()
    return columns


def _array(column: Any) -> np.ndarray:
    import pyarrow as pa

    if column.null_count:
        column = column.cast(pa.float64()).fill_null(math.nan)
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    # to_numpy would import pandas if that is installed.
    return np.from_dlpack(column)


_COLUMNS = ("lengths", "tokens", "action_mask", "rollout_logprob", "prompt_id", "prompt", "label", "datasource")


def _step(columns: Mapping[str, Any], most: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return one step: the histogram of all rewards, and some of the groups with the data of their responses."""
    lengths = np.asarray(columns["lengths"])
    reward = np.asarray(columns.get("reward", np.full(len(lengths), np.nan)), dtype=float)
    prompt = columns.get("prompt_id", range(len(lengths)))
    # Responses to a prompt need not be adjacent in a file.
    members: dict[int, list[int]] = defaultdict(list)
    for i, group in enumerate(prompt):
        members[int(group)].append(i)
    bins, bin_of = histogram(reward)
    largest = max(len(indices) for indices in members.values())
    most_each = max(48, most // min(MAX_IN_GROUP, largest))
    groups, used = list[dict[str, Any]](), 0
    # A missing reward counts as 0 in the choice of groups.
    worth = np.nan_to_num(reward)
    for group in choose_groups({g: worth[indices] for g, indices in members.items()}):
        chosen = [members[group][i] for i in _shown_responses(worth[members[group]])]
        cost = int(np.minimum(lengths[chosen], most_each).sum())
        if groups and used + cost > most:
            continue
        used += cost
        first = chosen[0]
        texts = {n: str(columns[n][first])[:1000] for n in ("prompt", "label", "datasource") if n in columns}
        responses = [{"bin": bin_of[i], **_response(columns, i, most_each, vocabulary)} for i in chosen]
        groups.append({"id": group, "of": len(members[group]), **texts, "responses": responses})
        if len(groups) == MAX_GROUPS:
            break
    cut = sum(any(kind < 0 for kind, _ in response["runs"]) for group in groups for response in group["responses"])
    # The page lists groups by their mean reward, best first.
    groups.sort(key=lambda group: -float(worth[members[group["id"]]].mean()))
    return {"of": len(lengths), "of_groups": len(members), "bins": bins, "cut": cut, "groups": groups}


def _shown_responses(reward: np.ndarray) -> list[int]:
    """Return the indices of a group's responses that are shown: all of them, or some of every reward in a large
    group.
    """
    if len(reward) <= MAX_IN_GROUP:
        return list(range(len(reward)))
    order = np.argsort(reward, kind="stable")
    return sorted(int(order[i]) for i in evenly(len(reward), MAX_IN_GROUP))


def choose_groups(rewards: Mapping[int, np.ndarray]) -> list[int]:
    """Return groups by their interest: the best, the worst, the one with the largest spread, then evenly spaced
    ones.
    """
    mean = {group: float(reward.mean()) for group, reward in rewards.items()}
    spread = {group: float(reward.std()) for group, reward in rewards.items()}
    ranked = sorted(rewards, key=lambda group: (mean[group], group))
    first = [ranked[-1], ranked[0], max(ranked, key=lambda group: (spread[group], -group))]
    return list(dict.fromkeys([*first, *(ranked[i] for i in evenly(len(ranked), MAX_GROUPS)), *ranked]))


def histogram(reward: np.ndarray) -> tuple[list[list[Any]], list[int | None]]:
    """Return bins as [from, to, count], and the index of the bin of each reward, or None if it is not finite.

    If there are few different values, each of them is a bin.
    """
    known = reward[np.isfinite(reward)]
    values = np.unique(known)
    if len(values) > BINS:
        edges = np.linspace(values[0], values[-1], BINS + 1)
        place = np.clip(np.searchsorted(edges, reward, side="right") - 1, 0, BINS - 1)
        ranges = list(itertools.pairwise(edges))
    else:
        place = np.searchsorted(values, reward)
        ranges = [(v, v) for v in values]
    bin_of = [int(i) if math.isfinite(r) else None for i, r in zip(place, reward)]
    return [[short(a), short(b), bin_of.count(i)] for i, (a, b) in enumerate(ranges)], bin_of


def keep(length: int, start: int, most: int) -> list[tuple[int, int]]:
    """Return the ranges of a sequence that are shown: begin and end of the part before `start`, and of the rest."""
    if length <= most:
        return [(0, length)]
    before = min(start, max(most // 4, most - (length - start)))
    ranges = []
    for low, high, space in ((0, start, before), (start, length, most - before)):
        if high - low <= space:
            ranges.append((low, high))
        else:
            ranges += [(low, low + space - space // 4), (high - space // 4, high)]
    return [(low, high) for low, high in ranges if low < high]


def _response(columns: Mapping[str, Any], i: int, most: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return one sequence.

    `runs` are [kind, number of tokens]; kind 1: the policy's tokens, 0: other tokens, -1: left out. `t` are the indices
    of the tokens in the vocabulary. Metrics have a value for each of the policy's tokens, or one value if all are
    equal.
    """

    def row(name: str) -> np.ndarray:
        values, offsets = columns[name]
        return values[offsets[i] : offsets[i + 1]]

    tokens = row("tokens")
    mask = np.ones(len(tokens), dtype=bool)
    if "action_mask" in columns:
        mask = row("action_mask").astype(bool)
    # Without a policy token the whole sequence is a prompt.
    start = int(mask.argmax()) if mask.any() else len(tokens)
    ranges = keep(len(tokens), start, most)
    runs: list[list[int]] = []
    reach = 0
    for low, high in ranges:
        if low > reach:
            runs.append([-1, low - reach])
        changes = low + 1 + np.flatnonzero(np.diff(mask[low:high]))
        runs += [[int(mask[a]), int(b - a)] for a, b in zip([low, *changes], [*changes, high])]
        reach = high
    kept = np.concatenate([np.arange(0), *(np.arange(low, high) for low, high in ranges)])
    response: dict[str, Any] = {"length": len(tokens), "policy": int(mask.sum()), "runs": runs}
    response["t"] = [index for low, high in ranges for index in vocabulary.indices(tokens[low:high].tolist())]
    actions = kept[mask[kept]]
    for name in PER_TOKEN:
        if name in columns:
            response[name] = _numbers(row(name)[actions], 3)
    if "logprob" in columns and "rollout_logprob" in columns:
        response["mismatch"] = _numbers(row("logprob")[actions] - row("rollout_logprob")[actions], 2)
    elif "rollout_logprob" in columns:
        response["logprob"] = _numbers(row("rollout_logprob")[actions], 3)
    for name in PER_SAMPLE:
        if name in columns:
            value = columns[name][i]
            response[name] = (value or "")[:1000] if isinstance(value, str | None) else short(float(value))
    return response


def _numbers(values: np.ndarray, digits: int) -> list[float | None] | float | None:
    """Round numbers to `digits` digits. Return one number if all are equal. NaN and infinities become None."""
    is_constant = len(values) > 0 and bool((values == values[0]).all())
    if is_constant:
        values = values[:1]
    rounded = [float(f"{v:.{digits}g}") if math.isfinite(v) else None for v in values.tolist()]
    return rounded[0] if is_constant else rounded
