"""Filter of system calls for programs in the sandbox, in the format of seccomp.

Namespaces hide files, processes and IP networks. The filter refuses calls that namespaces do not cover, or that a
program could use to attack the kernel: sockets to the host of a virtual machine, keyrings of the user, memory that
counts for no process, and new namespaces. A refused call fails as it would for a user without permission; the program
continues.
"""

from __future__ import annotations

import errno
import functools
import struct

LOAD, EQUALS, HAS_BITS, AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
"""Instructions: load a word of the call into the register, three comparisons of the register with a number, return."""
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets in bytes in the kernel's description of a call."""
NEW_USER = 0x10000000
OTHER_NUMBERS = 0x40000000
"""First number of another calling convention on x86_64 (x32)."""
FAMILIES = (1, 2, 10)
"""Socket families that namespaces isolate: Unix, IPv4, IPv6."""
LIMITS_OF = {"x86_64": 302, "aarch64": 261}
"""prlimit64. If the program has the same user as its init, it could lower the limits of init, and so prevent the record
of its own end."""
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SOCKET_CALLS = {"x86_64": (41, 53), "aarch64": (198, 199)}
"""socket and socketpair."""
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
"""Its flags are in memory, which a filter cannot read. If it fails, the C library uses clone."""
NEW_CALLS = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447, 463, 467)
"""io_uring_*, whose requests bypass any filter; open_tree to fspick, mount_setattr and open_tree_attr; pidfd_getfd;
memfd_secret; setxattrat."""
OLD_CALLS = {
    "x86_64": (29, 64, 68, 101, 155, 165, 166, 248, 249, 250, 272, 298, 308, 310, 311, 321, 323, 319, 240)
    + (188, 189, 190, 312),
    "aarch64": (194, 190, 186, 117, 41, 40, 39, 217, 218, 219, 97, 241, 268, 270, 271, 280, 282, 279, 180)
    + (5, 6, 7, 272),
}
"""shmget, semget, msgget, ptrace, pivot_root, mount, umount2, add_key, request_key, keyctl, unshare, perf_event_open,
setns, process_vm_readv, process_vm_writev, bpf, userfaultfd, memfd_create, mq_open, setxattr, lsetxattr,
fsetxattr, kcmp. Files of memfd_create and message queues use memory outside of file systems with a limited size, and
attributes of a file are not bounded by the limit of its size."""


@functools.cache
def call_filter(machine: str) -> bytes:
    """Return the filter for a processor, named as by `platform.machine`, with 8 bytes per instruction.

    Raises:
        RuntimeError: there is no filter for this processor.
    """
    # Numbers of system calls differ between processors. A wrong filter would protect nothing.
    if machine not in AUDIT:
        raise RuntimeError(f"no filter of system calls is known for {machine}; known: {', '.join(AUDIT)}")
    steps = [
        _step(LOAD, ARCHITECTURE),
        _step(EQUALS, AUDIT[machine], when=1),
        # Calls of another architecture have other numbers and would bypass the filter.
        _step(RETURN, KILL),
        _step(LOAD, NUMBER),
        _step(AT_LEAST, OTHER_NUMBERS, unless=1),
        _step(RETURN, FAIL | errno.ENOSYS),
        *_refused(EQUALS, CLONE3, errno.ENOSYS),
    ]
    for number in (*NEW_CALLS, *OLD_CALLS[machine]):
        steps += _refused(EQUALS, number, errno.EPERM)
    steps += _check_argument(CLONE[machine], _refused(HAS_BITS, NEW_USER, errno.EPERM))
    steps += _check_argument(LIMITS_OF[machine], _unless(0, errno.EPERM))
    families = [_step(EQUALS, family, when=len(FAMILIES) - place) for place, family in enumerate(FAMILIES)]
    for number in SOCKET_CALLS[machine]:
        steps += _check_argument(number, [*families, _step(RETURN, FAIL | errno.EAFNOSUPPORT)])
    return b"".join([*steps, _step(RETURN, ALLOW)])


def _step(code: int, number: int, when: int = 0, unless: int = 0) -> bytes:
    """Return an instruction with the number of instructions to skip if its comparison holds, or does not hold."""
    return struct.pack("HBBI", code, when, unless, number)


def _refused(comparison: int, number: int, error: int) -> list[bytes]:
    return [_step(comparison, number, unless=1), _step(RETURN, FAIL | error)]


def _unless(number: int, error: int) -> list[bytes]:
    return [_step(EQUALS, number, when=1), _step(RETURN, FAIL | error)]


def _check_argument(call: int, steps: list[bytes]) -> list[bytes]:
    """Return instructions that apply `steps` to the first argument of a call, and skip them for other calls."""
    return [_step(EQUALS, call, unless=len(steps) + 2), _step(LOAD, FIRST_ARGUMENT), *steps, _step(RETURN, ALLOW)]
