"""The sentence about a rank that waits in a collective, such as "rank 3 of ACTOR waits in all_gather of layer 12 for
rank 1, which is in the optimizer step".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from plugins.collective_watch.state import RankState

_MOST_NAMED = 3
"""Maximum number of ranks that a sentence describes. The others are counted."""


def missing_ranks(state: RankState, ranks: Collection[int], states: Mapping[int, RankState]) -> list[int]:
    """Return the ranks that have not started the pending collective of `state`.

    Args:
        state: state of the rank that waits.
        ranks: ranks of its group.
        states: last states of all ranks. A rank that has published none counts as missing.
    """
    pending = state.pending
    assert pending is not None
    missing: list[int] = []
    for rank in ranks:
        if rank == state.rank:
            continue
        if rank not in states or states[rank].counts.get(pending.group, 0) < pending.number:
            missing.append(rank)
    return missing


def wait_sentence(
    role: str, state: RankState, missing: Sequence[int], states: Mapping[int, RankState], silent: Mapping[int, float]
) -> str:
    """Return the sentence.

    Args:
        role: role of the ranks, or an empty string.
        state: state of the rank that waits.
        missing: ranks that have not started the collective.
        states: last states of the ranks.
        silent: seconds since the last state of each rank that does not respond.
    """
    assert state.pending is not None
    of_role = f" of {role}" if role else ""
    of_layer = f" of {state.layer}" if state.layer else ""
    waits = f"rank {state.rank}{of_role} waits in {state.pending.operation}{of_layer} ({state.phase})"
    if not missing:
        return f"{waits}, which all ranks have started: the network or a device does not complete it"
    parts = [f"rank {rank}, {_described(rank, states.get(rank), silent)}" for rank in missing[:_MOST_NAMED]]
    if len(missing) > _MOST_NAMED:
        parts.append(f"{len(missing) - _MOST_NAMED} more ranks")
    return f"{waits} for {'; and for '.join(parts)}"


def _described(rank: int, state: RankState | None, silent: Mapping[int, float]) -> str:
    """Return the relative clause about a rank that is waited for."""
    if state is None:
        return "which has reported nothing"
    of_layer = f" of {state.layer}" if state.layer else ""
    place = f"{state.phase}{of_layer}"
    if state.pending is not None:
        place = f"{state.pending.operation}{of_layer} ({state.phase}), another collective"
    if rank in silent:
        return f"which has not responded for {silent[rank]:.0f} s and was last in {place}"
    return f"which is in {place}"
