"""The rollouts of a run for its report: some steps, of each whole groups, with the text of every token.

Read with pyarrow alone: torch takes seconds to import, and a report is there at once.
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
"""Of a response; where responses are longer, there are fewer steps, so that so much of each is there."""
BINS = 12
PER_TOKEN = ("logprob", "advantage", "reference_logprob", "value")
PER_SAMPLE = ("sample_id", "branch", "reward", "score", "shaped_reward", "status", "error", "weight_version")
AT_ONCE = 200
"""Tokens that are decoded one after the other; bytes that never make a letter would otherwise take ever longer."""


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in a folder; None where there is none that can be read."""
    if not (folder / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    # The library raises plain Exceptions for a file that it does not understand; ids can be read too.
    except Exception:  # noqa: BLE001
        return None


class Vocabulary:
    """The tokens that a page shows: their ids and their texts, each once."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.entries: list[tuple[int, str]] = []
        self._tokenizer = tokenizer
        self._index: dict[tuple[int, str], int] = {}

    def indices(self, ids: Sequence[int]) -> list[int]:
        """Where the tokens of a text stand in `entries`. Letters that several tokens make are the last one's text."""
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
            stream = DecodeStream(skip_special_tokens=False)
            for i in ids[start : start + AT_ONCE]:
                yield (stream.step(self._tokenizer, i) or "")[:200]


def read_rollouts(run_dir: Path, most_tokens: int) -> dict[str, Any] | None:
    """Steps, groups and responses of `run_dir/rollouts`, about `most_tokens` tokens in all; None where there are none.

    What is left out is counted: `of_steps`, and in each step `of`, `of_groups` and `cut`.
    """
    files = sorted((run_dir / "rollouts").glob("step_*.parquet"), key=lambda path: int(path.stem[5:] or 0))
    if not files:
        return None
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    vocabulary = Vocabulary(tokenizer)
    steps = []
    last = _read(files[-1], ("lengths", "prompt_id")) or {}
    count = MAX_STEPS
    if len(last.get("lengths", ())):
        group = min(MAX_IN_GROUP, len(last["lengths"]) / len(set(last.get("prompt_id", ())) or {0}))
        a_group = group * min(TOKENS_TO_READ, max(1.0, float(np.mean(last["lengths"]))))
        count = int(min(MAX_STEPS, max(MIN_STEPS, most_tokens // max(a_group, 1))))
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
    """The columns of a file: per-token ones as (values, offsets), the others as arrays or lists; None: damaged."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with pa.OSFile(str(path)) as source:
            file = pyarrow.parquet.ParquetFile(source)
            wanted = [n for n in file.schema_arrow.names if n in (only or (*_WANTED, *PER_TOKEN, *PER_SAMPLE))]
            table = file.read(wanted)
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
    # Not to_numpy, which imports pandas where that is installed.
    return np.from_dlpack(column.cast(pa.uint8()) if pa.types.is_boolean(column.type) else column)


_WANTED = ("lengths", "tokens", "action_mask", "rollout_logprob", "prompt_id", "prompt", "label", "datasource")


def _step(columns: Mapping[str, Any], most: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """One step: the histogram of all its rewards, and some of its groups with all that is said of their responses."""
    lengths = np.asarray(columns["lengths"])
    reward = np.asarray(columns.get("reward", np.full(len(lengths), np.nan)), dtype=float)
    prompt = columns.get("prompt_id", range(len(lengths)))
    members: dict[int, list[int]] = defaultdict(list)
    for i, group in enumerate(prompt):
        members[int(group)].append(i)
    bins, bin_of = histogram(reward)
    most_each = max(48, most // min(MAX_IN_GROUP, max(len(own) for own in members.values())))
    groups, used = [], 0
    worth = np.nan_to_num(reward)
    for group in choose_groups({g: worth[own] for g, own in members.items()}):
        own = [members[group][i] for i in _some(worth[members[group]])]
        cost = int(np.minimum(lengths[own], most_each).sum())
        if groups and used + cost > most:
            continue
        used += cost
        first = own[0]
        about = {n: str(columns[n][first])[:1000] for n in ("prompt", "label", "datasource") if n in columns}
        responses = [{"bin": bin_of[i], **_response(columns, i, most_each, vocabulary)} for i in own]
        groups.append({"id": group, "of": len(members[group]), **about, "responses": responses})
        if len(groups) == MAX_GROUPS:
            break
    cut = sum(any(kind < 0 for kind, _ in response["runs"]) for group in groups for response in group["responses"])
    groups.sort(key=lambda group: -float(worth[members[group["id"]]].mean()))
    return {"of": len(lengths), "of_groups": len(members), "bins": bins, "cut": cut, "groups": groups}


def _some(reward: np.ndarray) -> list[int]:
    """The responses of a group that are shown: all, or of a large one some of every reward."""
    if len(reward) <= MAX_IN_GROUP:
        return list(range(len(reward)))
    order = np.argsort(reward, kind="stable")
    return sorted(int(order[i]) for i in evenly(len(reward), MAX_IN_GROUP))


def choose_groups(rewards: Mapping[int, np.ndarray]) -> list[int]:
    """Groups in the order in which they are worth a look: the best, the worst, the most spread, evenly between."""
    mean = {group: float(reward.mean()) for group, reward in rewards.items()}
    spread = {group: float(reward.std()) for group, reward in rewards.items()}
    ranked = sorted(rewards, key=lambda group: (mean[group], group))
    first = [ranked[-1], ranked[0], max(ranked, key=lambda group: (spread[group], -group))]
    return list(dict.fromkeys([*first, *(ranked[i] for i in evenly(len(ranked), MAX_GROUPS)), *ranked]))


def histogram(reward: np.ndarray) -> tuple[list[list[Any]], list[int | None]]:
    """Bins as [from, to, how many], one for each value where there are few, and the bin of each; None: no number."""
    known = reward[np.isfinite(reward)]
    values = np.unique(known)
    if len(values) > BINS:
        edges = np.linspace(values[0], values[-1], BINS + 1)
        place = np.clip(np.searchsorted(edges, reward, side="right") - 1, 0, BINS - 1)
        ranges = list(itertools.pairwise(edges))
    else:
        place = np.searchsorted(values, reward)
        ranges = [(v, v) for v in values]
    bin_of = [int(at) if math.isfinite(r) else None for at, r in zip(place, reward)]
    return [[short(a), short(b), bin_of.count(i)] for i, (a, b) in enumerate(ranges)], bin_of


def keep(length: int, start: int, most: int) -> list[tuple[int, int]]:
    """Ranges of a sequence that are shown: of what stands before `start` and of the rest the beginning and the end."""
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
    """One sequence: `runs` of tokens as [whose: 1 the policy's, 0 others', -1 left out; how many], `t` their places
    in the vocabulary, and numbers for the policy's tokens: one where all are equal.
    """

    def row(name: str) -> np.ndarray:
        values, offsets = columns[name]
        return values[offsets[i] : offsets[i + 1]]

    tokens = row("tokens")
    mask = row("action_mask").astype(bool) if "action_mask" in columns else np.ones(len(tokens), dtype=bool)
    ranges = keep(len(tokens), int(mask.argmax()) if mask.any() else len(tokens), most)
    runs: list[list[int]] = []
    reach = 0
    for low, high in ranges:
        if low > reach:
            runs.append([-1, low - reach])
        changes = low + 1 + np.flatnonzero(np.diff(mask[low:high]))
        runs += [[int(mask[a]), int(b - a)] for a, b in zip([low, *changes], [*changes, high])]
        reach = high
    kept = np.concatenate([np.arange(low, high) for low, high in ranges]) if ranges else np.arange(0)
    response: dict[str, Any] = {"length": len(tokens), "policy": int(mask.sum()), "runs": runs}
    response["t"] = [at for low, high in ranges for at in vocabulary.indices(tokens[low:high].tolist())]
    own = kept[mask[kept]]
    for name in PER_TOKEN:
        if name in columns:
            response[name] = _numbers(row(name)[own], 3)
    if "logprob" in columns and "rollout_logprob" in columns:
        response["mismatch"] = _numbers(row("logprob")[own] - row("rollout_logprob")[own], 2)
    elif "rollout_logprob" in columns:
        response["logprob"] = _numbers(row("rollout_logprob")[own], 3)
    for name in PER_SAMPLE:
        if name in columns:
            value = columns[name][i]
            response[name] = (value or "")[:1000] if isinstance(value, str | None) else short(float(value))
    return response


def _numbers(values: np.ndarray, digits: int) -> list[float | None] | float | None:
    same = len(values) > 0 and bool((values == values[0]).all())
    rounded = [float(f"{v:.{digits}g}") if math.isfinite(v) else None for v in values[: 1 if same else None].tolist()]
    return rounded[0] if same else rounded
