"""System calls of programs in the sandbox. None may have effects outside its folder or after its end."""

import json
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from plugins.sandbox import sandbox
from plugins.sandbox.code_tests import run_assertions
from plugins.sandbox.sandbox import Limits, run_python
from plugins.sandbox.sandbox_child import HOME_BYTES
from plugins.sandbox.sandbox_filter import (
    ALLOW,
    AUDIT,
    CLONE,
    LIMITS_OF,
    NEW_CALLS,
    OLD_CALLS,
    SOCKET_CALLS,
    call_filter,
)

IS_ISOLATED = not sandbox.isolation_fault()
"""True if programs can be isolated on this machine. Otherwise there are no guarantees to test."""
CALL = "import ctypes, errno\ncall = ctypes.CDLL(None, use_errno=True).syscall\n"
ATTEMPTS = {
    "a socket to the host of a virtual machine": "import socket\nsocket.socket(socket.AF_VSOCK)",
    "a socket to the kernel": "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "a socket below IP": "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "the kernel's ciphers": "import socket\nsocket.socket(38, socket.SOCK_SEQPACKET)",
    "the network": "import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=5)",
    "another process's socket": "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0ray')",
    "others' files": "open('/etc/shadow')",
    "others' processes": "import os\nos.listdir('/proc')",
    "a device": "import os\nos.mknod('sda', 0o60600, os.makedev(8, 0))",
    "more rights": "import os\nos.setuid(0)",
    "root": "import os\nos.chroot('.')",
    "the clock": "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)",
    "a higher rank": "import os\nos.nice(-1)",
    "higher limits": "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (99, 99))",
    "the interpreter": "import json\nopen(json.__file__, 'a')",
    "the system": "open('/usr/x', 'w')",
    "a large file": "open('x', 'wb').truncate(2**40)",
    "a large file in memory": "import os\nos.ftruncate(os.memfd_create('x'), 2**40)",
    "shared memory": "open('/dev/shm/x', 'wb').truncate(2**40)",
    "its input as a large file": "import os\nos.ftruncate(0, 2**40)",
}
"""Operations that raise OSError, or ValueError if Python itself checks the limit."""
NUMBERED = {
    "shmget": 0,
    "semget": 1,
    "msgget": 2,
    "ptrace": 3,
    "mount": 5,
    "unshare": 10,
    "add_key": 7,
    "keyctl": 9,
    "bpf": 15,
    "memfd_create": 17,
    "mq_open": 18,
    "setxattr": 19,
    "lsetxattr": 20,
    "fsetxattr": 21,
    "kcmp": 22,
    "io_uring": -1,
}
"""System calls by their index in OLD_CALLS. io_uring_setup is the first of NEW_CALLS."""


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_forbidden_operations_are_refused(attempt: str) -> None:
    indented = "".join(f"  {line}\n" for line in ATTEMPTS[attempt].splitlines())
    result = run_python(
        f"try:\n{indented}except (OSError, ValueError):\n  print('refused')", limits=Limits(timeout_s=60)
    )
    assert not IS_ISOLATED or (result.stdout, result.stderr) == ("refused\n", "")


@pytest.mark.parametrize("name", NUMBERED)
def test_system_calls_that_leave_objects_or_bypass_isolation_are_refused(name: str) -> None:
    place = NUMBERED[name]
    number = NEW_CALLS[0] if place < 0 else OLD_CALLS[platform.machine()][place]
    program = f"{CALL}print(call({number}, 0, 4096, 0o1600, 0), errno.errorcode.get(ctypes.get_errno()))"
    result = run_python(program, limits=Limits(timeout_s=60))
    assert not IS_ISOLATED or result.stdout == "-1 EPERM\n"


def test_common_libraries_and_devices_work() -> None:
    program = """
import concurrent.futures, multiprocessing, os, socket, subprocess, sys, tempfile, threading
with concurrent.futures.ThreadPoolExecutor(3) as pool:
    print(sum(pool.map(int, '123')))
with multiprocessing.get_context('fork').Pool(2) as pool:
    print(pool.map(abs, [-1, -2]))
print(subprocess.run([sys.executable, '-c', 'print(7)'], capture_output=True, text=True).stdout.strip())
one, other = socket.socketpair()
one.send(b'x')
print(other.recv(1), len(os.urandom(4)), tempfile.mkstemp()[0] > 2)
import numpy
print(numpy.ones((50, 50)).dot(numpy.ones(50)).sum())
"""
    result = run_python(program, limits=Limits(timeout_s=60))
    assert (result.stdout, result.stderr) == ("6\n[1, 2]\n7\nb'x' 4 True\n2500.0\n", "")


AGAINST_ITS_INIT = {
    "a signal that Python handles": "os.kill(1, signal.SIGINT)",
    "all other signals": "[os.kill(1, number) for number in range(1, 32) if number != signal.SIGINT]",
    "its limits": "resource.prlimit(1, resource.RLIMIT_FSIZE, (0, 0))",
    "its cores": "os.sched_setaffinity(1, {0})",
    "its descriptors": "call = ctypes.CDLL(None).syscall\nassert call(438, os.pidfd_open(1), 3, 0) < 0",
    "all processes": "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.kill(-1, signal.SIGTERM)",
}


def test_a_program_cannot_prevent_the_record_of_its_end(tmp_path: Path) -> None:
    """This also holds without root, where program and init have the same user."""
    head = "import ctypes, os, resource, signal, time\n"
    programs = {
        name: f"{head}try:\n  exec({what!r})\nexcept OSError: pass\ntime.sleep(.2)\nprint('done')"
        for name, what in AGAINST_ITS_INIT.items()
    }
    (tmp_path / "user.py").write_text(f"""
import json, os
from plugins.sandbox.sandbox import Limits, isolation_fault, run_python
programs = json.loads({json.dumps(programs)!r})
ends = {{}} if isolation_fault() else {{name: run_python(text).stdout for name, text in programs.items()}}
print(json.dumps([os.getuid(), ends]))
""")
    # Another user id for the same user: root has no privileges inside, and owns the same files.
    command = ["unshare", "--map-user=65534", "--map-group=65534", sys.executable, str(tmp_path / "user.py")]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    user, ends = json.loads(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    assert user == 65534
    assert not IS_ISOLATED or {name: text.splitlines()[-1:] for name, text in ends.items()} == {
        name: ["done"] for name in programs
    }


def test_a_program_has_only_three_descriptors() -> None:
    program = "import os\nfor fd in range(64):\n  try: os.fstat(fd)\n  except OSError: continue\n  print(fd)"
    assert run_python(program).stdout == "0\n1\n2\n"


GROW = """
import ctypes, json, os
call = ctypes.CDLL(None, use_errno=True).fallocate
call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
held = {}
for fd in range(3, 64):
  try: os.fstat(fd)
  except OSError: continue
  held[fd] = "inherited"
held |= {0: "stdin", 1: "stdout", 2: "stderr"}
grown = []
for fd, name in held.items():
  for mode in (0, 1, 0x10, 0x11, 3):
    if call(fd, mode, 0, 2**32) == 0: grown.append([name, mode])
  for how in (os.ftruncate, 2**32), (os.pwrite, b"x", 2**31), (os.posix_fallocate, 0, 99):
    try: how[0](fd, *how[1:])
    except OSError: continue
    grown.append([name, "changed"])
os.write(1, json.dumps(grown).encode())
"""
"""Program that tries to extend each of its descriptors."""


def test_no_descriptor_of_a_program_can_grow_a_file() -> None:
    assert run_python(GROW, "some input").stdout == "[]"


def test_no_descriptor_of_a_tested_program_can_grow_a_file() -> None:
    passed = run_assertions(f"{GROW}\ndef f(): return grown", ["assert f() == []"], Limits(timeout_s=60)).passed
    assert passed == (True,)


def test_files_of_a_program_are_limited_by_its_file_system() -> None:
    program = """
import ctypes, os
call = ctypes.CDLL(None, use_errno=True).fallocate
call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
total = 0
for number in range(1000):
  with open(f"f{number}", "wb") as file:
    for mode in (0, 1):
      for start in range(0, 2**28, 2**20): call(file.fileno(), mode, start, 2**20)
    total += os.fstat(file.fileno()).st_blocks * 512
print(total)
"""
    total = int(run_python(program, limits=Limits(timeout_s=60, cpu_s=60)).stdout)
    assert not IS_ISOLATED or total <= HOME_BYTES


def test_a_program_is_the_first_victim_of_the_oom_killer() -> None:
    # The program has no /proc to read the token from. Without isolation the token is world-readable there.
    program = "import os\nprint(os.path.exists('/proc') and open('/proc/self/oom_score_adj').read())"
    assert run_python(program).stdout in ("False\n", "1000\n\n")


def outcome(machine: str, number: int, argument: int = 0, architecture: int | None = None) -> int:
    """Return the filter's decision on a call, evaluated instruction by instruction like in the kernel."""
    shown = struct.pack("IIQQ", number, AUDIT[machine] if architecture is None else architecture, 0, argument)
    steps = list(struct.iter_unpack("HBBI", call_filter(machine)))
    place = accumulator = 0
    while True:
        code, when, unless, value = steps[place]
        place += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("I", shown, value)
        elif code == 0x06:
            return value
        else:
            holds = {0x15: accumulator == value, 0x45: bool(accumulator & value), 0x35: accumulator >= value}[code]
            place += when if holds else unless


@pytest.mark.parametrize("machine", AUDIT)
def test_the_filter_decides_by_number_argument_and_architecture(machine: str) -> None:
    not_permitted, no_such_call, no_such_family = (0x50000 | number for number in (1, 38, 97))
    for number in (*NEW_CALLS, *OLD_CALLS[machine]):
        assert outcome(machine, number) == not_permitted
    assert outcome(machine, 435) == no_such_call
    for number in SOCKET_CALLS[machine]:
        decided = [outcome(machine, number, family) for family in range(50)]
        assert [family for family, what in enumerate(decided) if what == ALLOW] == [1, 2, 10]
        assert {what for what in decided if what != ALLOW} == {no_such_family}
    assert outcome(machine, CLONE[machine], 0x01200011) == ALLOW
    assert outcome(machine, CLONE[machine], 0x10000011) == not_permitted
    assert outcome(machine, LIMITS_OF[machine], 0) == ALLOW
    assert outcome(machine, LIMITS_OF[machine], 1) == not_permitted
    assert outcome(machine, 0) == outcome(machine, 1) == outcome(machine, 59) == ALLOW
    # Call numbers have another meaning in another calling convention.
    assert outcome(machine, 0, architecture=0x40000003) == 0x80000000
    assert outcome(machine, 0x40000000 + 41) == no_such_call


def test_a_processor_without_a_filter_runs_no_program() -> None:
    with pytest.raises(RuntimeError, match="riscv64"):
        call_filter("riscv64")
