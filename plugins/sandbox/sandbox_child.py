"""Process between the sandbox and its program. It sets limits, and isolates the program if the system allows it.

    python -I -S sandbox_child.py SETTINGS

    sandbox.py -> this, in new namespaces -> init of the process namespace, which mounts the file systems -> the program

It imports nothing of this project and few other modules, because it is started for every program and has to be quick.
All processes in the process namespace end with its init, including forks of the program, and init ends with this
process.

The program sees the interpreter, its packages and the system's libraries, read-only; a few devices; and HOME, a file
system in memory that has only the program's file. It has no /proc, no network, no files, sockets or processes of
others, and no system calls that could bypass these restrictions. A program that is started by root runs as a separate
user without other processes.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from typing import Any

HOME = "/sandbox"
NEW_MOUNTS, NEW_NAMES, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USER, NEW_PIDS, NEW_NET = 0x10000000, 0x20000000, 0x40000000
NOSUID, NODEV, BIND, RECURSIVE, PRIVATE, DETACH = 0x2, 0x4, 0x1000, 0x4000, 0x40000, 0x2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, SET_READ_ONLY, SET_NOSUID = 442, -100, 0x8000, 0x1, 0x2
SET_PARENT_DEATH_SIGNAL, SET_FILTER, FILTER, SET_NO_NEW_PRIVILEGES = 1, 22, 2, 38
NOBODY = 65534
FIRST_USER = 2_000_000_000
"""First user number that no user has. The process id is added."""
PROCESSES, OPEN_FILES = 32, 64
HOME_BYTES = 2**26
"""Maximum size of all files of a program together, in bytes."""
DEVICES = ("null", "zero", "full", "random", "urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, call: str) -> None:
    """Raise OSError if a call of the C library has failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    _libc.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def leave() -> None:
    """Enter new namespaces. The process namespace is entered by the next fork."""
    new = NEW_MOUNTS | NEW_NAMES | NEW_IPC | NEW_PIDS | NEW_NET
    user, group = os.getuid(), os.getgid()
    if user == 0 and _libc.unshare(new) == 0:
        return
    checked(_libc.unshare(new | NEW_USER), "unshare")
    # Root is not mapped into the namespace, so that executed programs get no privileges over it.
    for file, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {user} 1"), ("gid_map", f"{NOBODY} {group} 1")):
        with open(f"/proc/self/{file}", "w", encoding="ascii") as target:
            target.write(text)


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount a file system. The arguments are those of the system call."""
    *coded, options = [None if text is None else text.encode() for text in (source, target, kind, data)]
    checked(_libc.mount(*coded, ctypes.c_ulong(flags), options), f"mount {target}")


def make_root(trees: list[str]) -> None:
    """Create the file system that the program sees, and make it the root."""
    mount("none", "/", None, RECURSIVE | PRIVATE)
    # Mounted over /proc, which every system has and no tree is in, and in these namespaces only. A new folder for each
    # program would stay on the disk if the process that made it is killed.
    root = "/proc"
    mount("tmpfs", root, "tmpfs", NOSUID | NODEV, "mode=0755,size=1m")
    for path in [*trees, *(f"/dev/{name}" for name in DEVICES)]:
        show(path, root + path)
    for path in ("/tmp", "/dev/shm"):
        # The tree of an interpreter may be there. In that case TMPDIR leads to a writable folder.
        if not os.path.lexists(root + path):
            os.symlink(HOME, root + path)
    os.mkdir(root + HOME)
    attributes = struct.pack("QQQQ", SET_READ_ONLY | SET_NOSUID, 0, 0, 0)
    arguments = (AT_FDCWD, root.encode(), AT_RECURSIVE, attributes, len(attributes))
    checked(_libc.syscall(MOUNT_SETATTR, *arguments), "mount_setattr")
    mount("tmpfs", root + HOME, "tmpfs", NOSUID | NODEV, f"mode=0700,size={HOME_BYTES},nr_inodes=4096")
    os.chdir(root)
    # After the call, the old root is mounted over the new one until it is unmounted.
    checked(_libc.syscall(PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    checked(_libc.umount2(b".", DETACH), "umount2")
    os.chdir(HOME)


def show(path: str, target: str) -> None:
    """Make a file, a tree or a symbolic link of the system visible at `target`."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT))
    mount(path, target, None, BIND | RECURSIVE)


def become(user: int) -> None:
    """Change to a user permanently."""
    os.setgroups([])
    try:
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError:  # the container does not map this number
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def limit(settings: dict[str, Any]) -> None:
    """Lower the resource limits of this process. Its children inherit them."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: settings["memory_bytes"],
        resource.RLIMIT_FSIZE: settings["file_bytes"],
        resource.RLIMIT_NOFILE: OPEN_FILES,
    }
    if settings["isolate"]:
        # Without isolation the limit would count all processes of the user, and there may be many.
        limits[resource.RLIMIT_NPROC] = PROCESSES
    for name, most in limits.items():
        hard = resource.getrlimit(name)[1]
        lowest = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(name, (lowest, lowest))
    # The signal at the first limit can be caught. One second later the kernel sends one that cannot.
    resource.setrlimit(resource.RLIMIT_CPU, (settings["cpu_s"], settings["cpu_s"] + 1))


def forbid(calls: bytes) -> None:
    """Make the kernel refuse system calls to this process and its children, with a filter of sandbox_filter.py."""
    held = ctypes.create_string_buffer(calls, len(calls))
    program = struct.pack("HxxxxxxQ", len(calls) // 8, ctypes.addressof(held))
    checked(_libc.prctl(SET_FILTER, ctypes.c_ulong(FILTER), program, 0, 0), "prctl")


def go_first() -> None:
    """Make the kernel end this process and its children first if memory runs short."""
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def let_go(descriptors: list[int]) -> None:
    """Close descriptors that only the program should hold, so that its end is noticed."""
    for descriptor in descriptors:
        os.close(descriptor)


def run(settings: dict[str, Any], user: int) -> None:
    """Replace this process by the program."""
    die_with_parent()
    if settings["isolate"]:
        # In a new session, signals to the program's process group do not reach the processes that wait for it.
        os.setsid()
        if os.getuid() == 0:
            os.chown(".", user, user)
            become(user)
            # The kernel clears the setting when a process changes its user.
            die_with_parent()
        checked(_libc.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
        forbid(bytes.fromhex(settings["filter"]))
    for descriptor in settings["keep"]:
        os.set_inheritable(descriptor, True)
    limit(settings)
    os.execv(settings["command"][0], settings["command"])


def main() -> None:
    """Start the program, wait for it, and write its exit code and its CPU seconds to the status pipe."""
    settings = json.loads(sys.argv[1])
    die_with_parent()
    if os.getppid() != settings["parent"]:
        sys.exit(1)
    go_first()
    user = FIRST_USER + os.getpid()
    for descriptor in (settings["status"], settings["program"], *settings["keep"]):
        os.set_inheritable(descriptor, False)
    if settings["isolate"]:
        leave()
        if init := os.fork():
            let_go(settings["keep"])
            _, how = os.waitpid(init, 0)
            if os.WIFSIGNALED(how):  # killed by the kernel for lack of memory, so init could not write the status
                os.write(settings["status"], f"{os.waitstatus_to_exitcode(how)} 0".encode())
            return
        die_with_parent()
        # Programs of the same user may send signals to init. Signals without a handler have no effect on an init.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        make_root(settings["trees"])
        with os.fdopen(settings["program"], "rb", closefd=False) as program, open("main.py", "wb") as file:
            file.write(program.read())
        if os.getuid() == 0:
            os.chmod(".", 0o755)
    if child := os.fork():
        let_go(settings["keep"])
        _, how, used = os.wait4(child, 0)
        os.write(settings["status"], f"{os.waitstatus_to_exitcode(how)} {used.ru_utime + used.ru_stime}".encode())
        os._exit(0)
    run(settings, user)


if __name__ == "__main__":
    main()
