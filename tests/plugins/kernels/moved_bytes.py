"""Counter of the bytes that torch operations read and write."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = {"mm", "addmm", "addmm_", "bmm"}
"""Matrix products, which are limited by arithmetic: a GPU reads their factors while it computes."""

FILLED = ("zeros", "ones", "full")
"""Beginnings of the names of operations that read no element of their arguments."""
PICKED = ("index", "embedding")
"""Beginnings of the names of operations that read or write some rows of their first argument."""


class MovedBytes(TorchDispatchMode):
    """Context manager that counts the bytes of tensors that operations read or write.

    Views and uninitialised memory count 0. The factors of a matrix product are not counted, but its result is, and
    the matrix that a product is added to is read and written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_operation: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Number of bytes moved by all operations."""
        return self.by_operation.total()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if is_view or name.startswith(("empty", "new_empty", "detach")):
            return result
        inputs = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        read = list(inputs.values())
        if name in PRODUCTS:
            read = [args[0]] if name.startswith("addmm") else []
        elif name.startswith(FILLED):
            read = []
        elif name.startswith(PICKED):
            # Of the first argument, only the elements that are read or written.
            self.by_operation[name] += 2 * (args[-1] if name.endswith("_") else results[0]).nbytes
            return result
        outputs = {id(leaf): leaf for leaf in results}
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else (kwargs or {}).get(argument.name)
                outputs |= {id(leaf): leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}
                # An operation with `out=` does not read it, unless it is an argument as well.
                if argument.name == "out" and not any(value is other for other in args):
                    read = [tensor for tensor in read if tensor is not value]
        self.by_operation[name] += sum(tensor.nbytes for tensor in (*read, *outputs.values()))
        return result
