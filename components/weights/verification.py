"""Interface of the verification of weights: digests of tensors at the publisher and in the engines.

`rollout.verify_weight_sync=true` loads the plug-in that provides it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from components.registry import load
from components.weights.timing import SyncTimer

if TYPE_CHECKING:
    from torch import Tensor

VERIFICATION = "weight verification"
"""Kind of the plug-ins that verify weights."""
OPTION = "rollout.verify_weight_sync=true"
"""Option that loads them."""


class TensorDigests(Protocol):
    """Digests of many tensors."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, which may be overwritten afterwards by operations on the same stream."""
        ...

    def result(self) -> dict[str, str]:
        """Return the digest of each tensor by name."""
        ...


def open_digests(timer: SyncTimer | None = None) -> TensorDigests:
    """Return empty digests. `timer` measures the part "digest".

    Raises:
        MissingPlugin: no plug-in provides them.
    """
    return load(VERIFICATION, "digests", OPTION)(timer)
