"""Comparison of the digests of published and received weights."""

from __future__ import annotations

from components.weights.digest import Digests, compare_digests
from components.weights.publisher import WeightHandle, read_digests

__all__ = ["Digests", "check_received"]


def check_received(handle: WeightHandle, digests: dict[str, str]) -> None:
    """Compare the digests of the tensors that an engine has received with those of the publisher.

    Args:
        handle: handle of the version.
        digests: digest of each received tensor by name.

    Raises:
        RuntimeError: a digest differs, or a tensor is missing on one side.
    """
    faults = compare_digests(read_digests(handle), digests)
    if faults:
        raise RuntimeError(f"version {handle.version} of the weights arrived damaged: {', '.join(faults)}")
