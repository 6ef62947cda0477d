"""Counter of the bytes that torch operations write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class WrittenBytes(TorchDispatchMode):
    """Context manager that counts the bytes written by operations of this thread, into arguments or new memory.

    Views, uninitialised memory (`empty`) and changes of a tensor's storage (`set_`) count 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_operation: dict[str, int] = {}
        self.calls: dict[str, int] = {}

    @property
    def total(self) -> int:
        """Number of bytes written by all operations."""
        return sum(self.by_operation.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        nbytes = sum(tensor.nbytes for tensor in _written(func._schema, args, kwargs or {}, result))
        if nbytes and not name.startswith(("empty", "set_")):
            self.by_operation[name] = self.by_operation.get(name, 0) + nbytes
            self.calls[name] = self.calls.get(name, 0) + 1
        return result


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Iterator[Tensor]:
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    # A result without alias information is a new tensor, not a view or an argument.
    if all(each.alias_info is None for each in schema.returns):
        yield from (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
