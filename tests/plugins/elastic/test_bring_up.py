"""Calls of a removed worker go to another one, and additional workers are members of a role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core.context import Identity, WorkloadContext
from core.members import Directory, Member, RoleEntry, Transport
from core.role_group import RoleGroup
from core.roles import Role

ROLE = Role.ROLLOUT


def directory(count: int) -> Directory:
    known = Directory(recovers=True)
    known.add_entries({ROLE: RoleEntry("run", [Member(ROLE, rank, f"process {rank}") for rank in range(count)])})
    return known


class Nowhere(Transport):
    """A transport that sends nothing."""

    def send(self, member: Member, export: object, share: object) -> None:
        del member, export, share


def group(known: Directory, tmp_path: Path) -> RoleGroup[Any]:
    identity = Identity("job", "run", 0.0, Role("DRIVER"), 0, 1)
    context = WorkloadContext(identity, None, known, Nowhere(), lambda *_: None, tmp_path)
    return RoleGroup(ROLE, context=context)


def test_an_additional_worker_is_a_member(tmp_path: Path) -> None:
    known = directory(2)
    known.replace(Member(ROLE, 2, "process 2"), rank=2)
    assert [member.handle for member in group(known, tmp_path)] == ["process 0", "process 1", "process 2"]


def test_a_removed_worker_is_no_member_and_its_calls_go_to_another_one(tmp_path: Path) -> None:
    known = directory(3)
    removed = known[ROLE].members[1]
    known.lose(ROLE, 1)
    known.replace(known[ROLE].members[0], rank=1)
    assert [member.rank for member in group(known, tmp_path)] == [0, 2]
    assert len(group(known, tmp_path)) == 2
    # Without a wait: the worker does not count as lost any more.
    assert known.replacement(removed, timeout=0.0) == known[ROLE].members[0]


def test_calls_of_a_removed_worker_follow_the_replacement_of_the_other_one() -> None:
    known = directory(2)
    known.replace(known[ROLE].members[0], rank=1)
    substitute = known[ROLE].members[1]
    known.report_dead(substitute)
    assert known.replacement(substitute, timeout=0.0) is None
    again = Member(ROLE, 0, "process 0 again", attempt=2)
    known.replace(again, rank=0)
    assert known.replacement(substitute, timeout=0.0) == again
