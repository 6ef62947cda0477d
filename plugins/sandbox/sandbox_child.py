"""Between the sandbox and its program: limits, and where the system allows it a small machine of the program's own.

    python -I -S sandbox_child.py SETTINGS

    sandbox.py -> this, in new namespaces -> init of the process namespace, which mounts what there is -> the program

It imports nothing of ours and little else: it is started for every program, and that has to be quick. Everything in the
process namespace ends when its init does, whatever the program has forked, and that ends with this process.

What the program sees: the interpreter, its packages and the system's libraries, read-only; a few devices; HOME, a file
system in memory, which is empty but for its own file. No /proc, no network, nobody else's files, sockets or processes,
and no system calls that would get round these.
A program that is started by root runs as a user of its own, who has no other process.
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
"""Numbers of users from here on are nobody's; a process id is added."""
PROCESSES, OPEN_FILES = 32, 64
HOME_BYTES = 2**26
"""Of all files of a program together."""
DEVICES = ("null", "zero", "full", "random", "urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    """Raise what a call of the C library has failed with."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def die_with_parent() -> None:
    """Have the kernel end this process with the one that started it."""
    _libc.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def leave() -> None:
    """Leave all that is shared with other processes; the process namespace with the next fork."""
    new = NEW_MOUNTS | NEW_NAMES | NEW_IPC | NEW_PIDS | NEW_NET
    user, group = os.getuid(), os.getgid()
    if user == 0 and _libc.unshare(new) == 0:
        return
    checked(_libc.unshare(new | NEW_USER), "unshare")
    # No user of the namespace is root, so that what is executed in it has no rights over it.
    for file, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {user} 1"), ("gid_map", f"{NOBODY} {group} 1")):
        with open(f"/proc/self/{file}", "w", encoding="ascii") as target:
            target.write(text)


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount a file system; the arguments are the system call's."""
    coded = [None if text is None else text.encode() for text in (source, target, kind)]
    checked(_libc.mount(*coded, ctypes.c_ulong(flags), None if data is None else data.encode()), f"mount {target}")


def make_root(trees: list[str]) -> None:
    """Make the file system that the program sees, and change to it."""
    mount("none", "/", None, RECURSIVE | PRIVATE)
    # On top of /proc, which every system has and no tree lies in, and in these namespaces alone: a folder made for
    # each program would stay on the disk when the process that made it is killed.
    root = "/proc"
    mount("tmpfs", root, "tmpfs", NOSUID | NODEV, "mode=0755,size=1m")
    for path in [*trees, *(f"/dev/{name}" for name in DEVICES)]:
        show(path, root + path)
    for path in ("/tmp", "/dev/shm"):
        # An interpreter may lie there, whose tree is shown; TMPDIR says where there is room then.
        if not os.path.lexists(root + path):
            os.symlink(HOME, root + path)
    os.mkdir(root + HOME)
    attributes = struct.pack("QQQQ", SET_READ_ONLY | SET_NOSUID, 0, 0, 0)
    arguments = (AT_FDCWD, root.encode(), AT_RECURSIVE, attributes, len(attributes))
    checked(_libc.syscall(MOUNT_SETATTR, *arguments), "mount_setattr")
    mount("tmpfs", root + HOME, "tmpfs", NOSUID | NODEV, f"mode=0700,size={HOME_BYTES},nr_inodes=4096")
    os.chdir(root)
    # The old root lies on top of the new one then, until it is unmounted.
    checked(_libc.syscall(PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    checked(_libc.umount2(b".", DETACH), "umount2")
    os.chdir(HOME)


def show(path: str, target: str) -> None:
    """Let a file, a tree or a symbolic link of the system be seen at `target`."""
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
    """Be this user, for good."""
    os.setgroups([])
    try:
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError:  # a container that knows no such number
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def limit(settings: dict[str, Any]) -> None:
    """Lower the limits of this process, which its children inherit."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: settings["memory_bytes"],
        resource.RLIMIT_FSIZE: settings["file_bytes"],
        resource.RLIMIT_NOFILE: OPEN_FILES,
    }
    if settings["isolate"]:
        # Elsewhere all of the user's processes count, and there may be many.
        limits[resource.RLIMIT_NPROC] = PROCESSES
    for name, most in limits.items():
        hard = resource.getrlimit(name)[1]
        lowest = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(name, (lowest, lowest))
    # The first signal can be caught; a second later comes one that cannot.
    resource.setrlimit(resource.RLIMIT_CPU, (settings["cpu_s"], settings["cpu_s"] + 1))


def forbid(calls: bytes) -> None:
    """Have the kernel refuse system calls to this process and its children, by a filter of sandbox_filter.py."""
    held = ctypes.create_string_buffer(calls, len(calls))
    program = struct.pack("HxxxxxxQ", len(calls) // 8, ctypes.addressof(held))
    checked(_libc.prctl(SET_FILTER, ctypes.c_ulong(FILTER), program, 0, 0), "prctl")


def go_first() -> None:
    """Where memory runs short, have the kernel end this process and its children before any other."""
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def let_go(descriptors: list[int]) -> None:
    """Close what the program alone should have, so that its end is noticed."""
    for descriptor in descriptors:
        os.close(descriptor)


def run(settings: dict[str, Any], user: int) -> None:
    """Be the program."""
    die_with_parent()
    if settings["isolate"]:
        # Signals to its own group do not reach those that wait for it.
        os.setsid()
        if os.getuid() == 0:
            os.chown(".", user, user)
            become(user)
            # It is cleared when a process becomes somebody else.
            die_with_parent()
        checked(_libc.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
        forbid(bytes.fromhex(settings["filter"]))
    for descriptor in settings["keep"]:
        os.set_inheritable(descriptor, True)
    limit(settings)
    os.execv(settings["command"][0], settings["command"])


def main() -> None:
    """Start the program, wait for it, and write down how it ended and the seconds of CPU that it took."""
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
            if os.WIFSIGNALED(how):  # by the kernel, where memory ran short; nobody is left who says it
                os.write(settings["status"], f"{os.waitstatus_to_exitcode(how)} 0".encode())
            return
        die_with_parent()
        # A program of the same user may send it signals, and those that nobody handles are not for an init.
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
