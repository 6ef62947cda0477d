"""Splitting of call arguments over workers, and joining of results.

Splittable arguments are lists, arrays and tensors with at least one dimension, and objects with `__shard__(n)`. All
other arguments are sent whole to every worker. Arrays and tensors are recognised by the module of their class, so this
module imports neither numpy nor torch.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from core.exports import Replicated


def _is_array(value: Any) -> bool:
    module = type(value).__module__.partition(".")[0]
    return module in ("numpy", "torch") and bool(getattr(value, "shape", ()))


def is_splittable(value: Any) -> bool:
    """True if an argument is cut into one chunk per worker."""
    return isinstance(value, list) or hasattr(type(value), "__shard__") or _is_array(value)


def chunk_sizes(length: int, workers: int) -> list[int]:
    """Return the sizes of `workers` contiguous chunks. They differ by at most one, the larger ones first.

    >>> chunk_sizes(7, 3)
    [3, 2, 2]
    """
    base, extra = divmod(length, workers)
    # The larger chunks first, so that chunks differ by one item at most and no worker waits for a last large one.
    return [base + (i < extra) for i in range(workers)]


def split(value: Any, workers: int) -> list[Any]:
    """Cut a splittable value into contiguous chunks, one per worker. Some may be empty."""
    if hasattr(type(value), "__shard__"):
        return value.__shard__(workers)
    chunks = []
    start = 0
    for size in chunk_sizes(len(value), workers):
        part = value[start : start + size]
        # Pickling a view of a tensor would pickle the whole storage of its parent.
        chunks.append(part.clone() if type(value).__module__.startswith("torch") else part)
        start += size
    return chunks


def join(parts: Sequence[Any], name: str) -> Any:
    """Join the workers' results: lists, tuples, arrays, tensors, or objects with `__unshard__`.

    Raises:
        TypeError: results of this type cannot be concatenated.
    """
    first = parts[0]
    if hasattr(type(first), "__unshard__"):
        return type(first).__unshard__(list(parts))
    if isinstance(first, list | tuple):
        return [item for part in parts for item in part]
    if _is_array(first):
        # The library of the first part is loaded already, so core itself imports neither numpy nor torch.
        package = type(first).__module__.partition(".")[0]
        return getattr(sys.modules[package], {"numpy": "concatenate", "torch": "cat"}[package])(list(parts))
    raise TypeError(f"{name} returned {type(first).__name__}, which cannot be joined; return one item per input item")


def shard_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], workers: int, name: str
) -> tuple[list[tuple[tuple[Any, ...], dict[str, Any]]], int]:
    """Return one (args, kwargs) per worker, and the common length of the split arguments.

    Raises:
        ValueError: no argument is splittable, or the splittable ones differ in length. The message names them.
    """
    labelled: list[tuple[str, Any]] = [(f"argument {i}", value) for i, value in enumerate(args)]
    labelled += list(kwargs.items())
    lengths = {label: len(value) for label, value in labelled if is_splittable(value)}
    if not lengths:
        raise ValueError(f"{name}: none of the arguments can be split; pass a list, an array or a batch")
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{label} has {length}" for label, length in lengths.items())
        raise ValueError(f"{name}: arguments to split differ in length ({listed}); use replicate(x) to send one whole")
    spread = [_spread(value, workers) for _, value in labelled]
    calls = []
    for worker in range(workers):
        values = [column[worker] for column in spread]
        calls.append((tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))))
    return calls, next(iter(lengths.values()))


def _spread(value: Any, workers: int) -> list[Any]:
    return split(value, workers) if is_splittable(value) else [unwrap(value)] * workers


def unwrap(value: Any) -> Any:
    """Return the value inside `replicate(value)`. Other values are returned unchanged."""
    return value.value if isinstance(value, Replicated) else value


def payload_bytes(*values: Any) -> int:
    """Return the approximate size in bytes of the arrays in the values, one level into lists, tuples and mappings."""
    total = 0
    for value in values:
        if isinstance(value, bytes | str):
            total += len(value)
        elif isinstance(value, list | tuple | Mapping):
            items = value.values() if isinstance(value, Mapping) else value
            total += sum(int(getattr(item, "nbytes", 0) or 0) for item in items)
        else:
            total += int(getattr(unwrap(value), "nbytes", 0) or 0)
    return total
