"""Between the sandbox and its program.

    python -I -S sandbox_child.py PARENT IS_CUT CPU_S MEMORY_BYTES FILE_BYTES STATUS_FD COMMAND...

    sandbox.py -> this, which cuts the network -> init of an own process namespace -> COMMAND

It imports nothing of ours and little else: it is started for every program, and that has to be quick. With the
namespace everything in it ends when its init does, whatever it has forked, and that ends with this process.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

NEW_USER, NEW_PIDS, NEW_NET = 0x10000000, 0x20000000, 0x40000000
PROCESSES, OPEN_FILES = 64, 64


def die_with_parent() -> None:
    """Have the kernel end this process with the one that started it."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def isolate() -> bool:
    """Leave the network and, with the next fork, the process namespace; False where the system does not let us."""
    return ctypes.CDLL(None).unshare(NEW_USER | NEW_PIDS | NEW_NET) == 0


def limit(cpu_s: int, memory_bytes: int, file_bytes: int, *, own_processes: bool) -> None:
    """Lower the limits of this process, which its children inherit."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: OPEN_FILES,
    }
    if own_processes:
        # Elsewhere all of the user's processes count, and there may be many.
        limits[resource.RLIMIT_NPROC] = PROCESSES
    for name, most in limits.items():
        hard = resource.getrlimit(name)[1]
        lowest = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(name, (lowest, lowest))
    # The first signal can be caught; a second later comes one that cannot.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


def main() -> None:
    """Start the command, wait for it, and write down how it ended and the seconds of CPU that it took."""
    parent, is_cut, cpu_s, memory_bytes, file_bytes, status = map(int, sys.argv[1:7])
    die_with_parent()
    if os.getppid() != parent:
        sys.exit(1)
    os.set_inheritable(status, False)
    if is_cut:
        if not isolate():
            sys.exit(1)
        if init := os.fork():
            os.waitpid(init, 0)
            return
        die_with_parent()
    if child := os.fork():
        _, how, used = os.wait4(child, 0)
        os.write(status, f"{os.waitstatus_to_exitcode(how)} {used.ru_utime + used.ru_stime}".encode())
        os._exit(0)
    die_with_parent()
    limit(cpu_s, memory_bytes, file_bytes, own_processes=bool(is_cut))
    os.execv(sys.argv[7], sys.argv[7:])


if __name__ == "__main__":
    sys.exit(not isolate()) if sys.argv[1:] == ["probe"] else main()
