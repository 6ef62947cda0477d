"""Assertions about programs: only the computed values decide whether a test passes."""

import re

import pytest

from plugins.sandbox import sandbox
from plugins.sandbox.code_tests import AssertionResult, run_assertions
from plugins.sandbox.sandbox import Limits
from tests.messages import says

LIMITS = Limits(timeout_s=60.0)
TEST = "assert add(20, 22) == 42"
IS_ISOLATED = not sandbox.isolation_fault()


def passes(program: str, *tests: str) -> list[bool]:
    return list(run_assertions(program, tests or (TEST,), LIMITS).passed)


HONEST = {
    "a function": ("def add(a, b): return a + b", [TEST, "assert add(1, 1) == 2"]),
    "a class": (
        "class Solution:\n  def __init__(self, n=0): self.n = n\n  def two(self, x): return [x, (1, 2), {'a': {3}}]",
        [
            "s = Solution(n=4)\nassert s.two(2) == [2, (1, 2), {'a': {3}}] and s.n == 4",
            "assert Solution().two(1)[0] == 1",
        ],
    ),
    "a function that is handed over": (
        "def add(a, b): return a + b",
        ["def check(candidate):\n    assert candidate(1, b=2) == 3\ncheck(add)"],
    ),
    "a generator": ("def g(n):\n  yield from range(n)", ["assert list(g(3)) == [0, 1, 2]", "assert sum(g(4)) == 6"]),
    "an error": (
        "def f(x):\n  raise ValueError('below zero')",
        ["try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    assert 'zero' in str(error)"],
    ),
    "a module": ("import math\ndef f(): return 3.0", ["assert math.isclose(f(), 3.0)"]),
    "the name of a module": ("def queue(x): return x + 1", ["assert queue(2) == 3"]),
    "numpy": ("import numpy as np\ndef f(): return np.arange(3)", ["assert (f() == np.arange(3)).all()"]),
    "numbers": (
        "from fractions import Fraction\ndef f(): return [10**5000, float('inf'), 1j, b'', None, True, Fraction(1, 3)]",
        ["assert f()[:6] == [10 ** 5000, float('inf'), 1j, b'', None, True] and f()[6] * 3 == 1"],
    ),
    "what is redefined": ("exec = print = lambda *_: None\ndef add(a, b): return a + b", [TEST]),
    "state that a test has changed": (
        "seen = []\ndef f(): seen.append(1); return len(seen)",
        ["assert f() == 1 and f() == 2", "assert f() == 1"],
    ),
}


@pytest.mark.parametrize("case", HONEST)
def test_an_honest_program_passes(case: str) -> None:
    program, tests = HONEST[case]
    assert passes(program, *tests) == [True] * len(tests)


EQUAL = (
    "class Any(int):\n  __eq__ = __le__ = __ge__ = lambda *_: True\n  __ne__ = lambda *_: False\n"
    "  __hash__ = int.__hash__\n"
)
SOUGHT = "chr(61) * 2 + ' 42'"
"""Part of the test, written so that a program that searches for it does not match itself."""
CHEATS = {
    "early exit": "raise SystemExit(0)",
    "early exit without a word": "import os\nos._exit(0)",
    "exit when called": "import os\ndef add(a, b): os._exit(0)",
    "exit with a reply's look": "import sys\ndef add(a, b):\n  print('[null]', flush=True)\n  sys.exit(0)",
    "an equality that always holds": f"{EQUAL}def add(a, b): return Any(1)",
    "a class of its own that equals all": (
        "class E:\n  __eq__ = lambda *_: True\n  __ne__ = lambda *_: False\ndef add(a, b): return E()"
    ),
    "a float that equals all": f"{EQUAL.replace('int', 'float')}def add(a, b): return Any(1)",
    "a text that equals all": f"{EQUAL.replace('int', 'str')}def add(a, b): return Any(1)",
    "a list that equals all": "class L(list):\n  __eq__ = lambda *_: True\ndef add(a, b): return L()",
    "patched builtins": (
        "import builtins\nbuiltins.all = builtins.any = lambda *_: True\nbuiltins.AssertionError = None\nadd = max"
    ),
    "a patched comparison": "import operator, math\noperator.eq = math.isclose = lambda *_: True\nadd = max",
    "no assertions": "import sys\nsys.flags = None\n__debug__ and None\nadd = max",
    "the stack": (
        "import sys\ndef add(a, b):\n  frame = sys._getframe()\n  while frame:\n"
        "    for value in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
        f"      if {SOUGHT} in repr(value): return 42\n    frame = frame.f_back"
    ),
    "the heap": (
        "import gc\ndef add(a, b):\n"
        "  things = [thing for thing in gc.get_objects() if isinstance(thing, (list, tuple))]\n"
        f"  if any({SOUGHT} in repr(thing) for thing in things): return 42"
    ),
    "other processes": (
        "from glob import glob\ndef add(a, b):\n  for file in glob('/proc/*/cmdline') + glob('/proc/*/environ'):\n"
        f"    if {SOUGHT} in open(file, errors='replace').read(): return 42"
    ),
    "files": (
        "import os\ndef add(a, b):\n  for top, _, files in os.walk(os.environ['HOME']):\n    for file in files:\n"
        "      if file != 'main.py' and '42' in open(os.path.join(top, file), errors='replace').read(): return 42"
    ),
    "its input": "import os\ntext = os.pread(0, 9999, 0).decode()\ndef add(a, b): return 42 if '42' in text else 0",
    "descriptors": (
        "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'null\\n')\n  except OSError: continue\nadd = max"
    ),
    "a reply in advance": (
        "import os\ndef add(a, b):\n  for fd in range(3, 64):\n"
        """    try: os.write(fd, b'["value", ["bool", "1"]]\\n')\n"""
        "    except OSError: continue\n  return 0"
    ),
    "a flood of output": "print('passed ' * 200_000)\nadd = max",
    "a flood of a value": "def add(a, b): return 'x' * (300 * 2**20)",
    "a value without an end": "def add(a, b):\n  x = []\n  x.append(x)\n  return x",
    "a value that is none": "class E:\n  __class__ = int\ndef add(a, b): return E()",
    "an assertion of its own": "def add(a, b): raise AssertionError('passed')",
    "an end by signal": "import os\ndef add(a, b): os.kill(os.getppid(), 9)",
    "what waits for it": "import signal, os\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nadd = max",
    "a thread": "import threading, os\nthreading.Timer(0.1, lambda: os._exit(0)).start()\nadd = max",
    "an import of tests": "import sys\nsys.modules['unittest'] = sys.modules['pytest'] = sys\nadd = max",
    "names of the test": "assert_ = lambda *_: None\nTrue_ = 1\ndef __missing__(*_): return 42\nadd = max",
    "no program": "def add(a, b):",
    "nothing": "",
}
"""Programs that a policy may learn if it is rewarded for passing tests. None of them adds 20 and 22."""
if IS_ISOLATED:
    # Elsewhere it would kill all processes of the user.
    CHEATS["the end of all"] = "import os\ndef add(a, b): os.kill(-1, 9)"


# Data that the program sends instead of a reply, repeatedly.
FORGED = """  for fd in range(3, 64):
    try: os.write(fd, b'["value", ["bool", "1"]]\\n')
    except OSError: pass
"""
REST = "\nadd = max"
MORE_CHEATS = {
    "a trace function": (
        "import sys\ndef trace(frame, event, arg):\n  frame.f_locals.update(outcome=None, passed=True)\n"
        f"  return trace\nsys.settrace(trace)\nsys.setprofile(trace){REST}"
    ),
    "frames of an error": (
        "def add(a, b):\n  try: 1 / 0\n  except ZeroDivisionError as e:\n    f = e.__traceback__.tb_frame\n"
        f"    while f:\n      if {SOUGHT} in repr([*f.f_locals.values()]): return 42\n      f = f.f_back"
    ),
    "numbers changed in memory": f"import ctypes\nfor n in range(43, 257): ctypes.memset(id(n) + 24, 42, 1){REST}",
    "a float that says another number": (
        "class E(float):\n  __repr__ = lambda _: '42.0'\n  __float__ = lambda _: 41.0\n"
        "  __eq__ = lambda *_: True\ndef add(a, b): return E(1)"
    ),
    "a class whose class equals all": (
        "class M(type):\n  __eq__ = lambda *_: True\n  __hash__ = type.__hash__\nclass E(metaclass=M): pass\n"
        "def add(a, b): return E"
    ),
    "an array that equals all": (
        "import numpy as np\nclass A(np.ndarray):\n  __eq__ = __bool__ = lambda *_: True\n"
        "def add(a, b): return np.zeros(1).view(A)"
    ),
    "an array of its own": (
        "class E:\n  tolist = lambda *_: 1\n  __eq__ = lambda *_: True\nE.__module__ = 'numpy'\n"
        "def add(a, b): return E()"
    ),
    "an object of mock": "from unittest.mock import ANY\ndef add(a, b): return ANY",
    "a module": "import types\ndef add(a, b): return types.ModuleType('idlelib.__main__')",
    "an end of its own name": "def add(a, b): raise type('SystemExit', (BaseException,), {})(0)",
    "an interrupt": "def add(a, b): raise KeyboardInterrupt",
    "an error that says too much": "def add(a, b): raise ValueError('x' * 10**7)",
    "an error that cannot be told": ("class E(Exception):\n  def __str__(self): raise self\ndef add(a, b): raise E"),
    "an error made of more": "def add(a, b): raise type('UnicodeDecodeError', (Exception,), {})('x')",
    "what is done at the end": f"import atexit, os\ndef late():\n{FORGED}atexit.register(late){REST}",
    "closed descriptors": f"import os\nos.closerange(0, 64){REST}",
    "descriptors that lead elsewhere": (
        f"import os\nfor fd in range(3, 64):\n  try: os.fstat(fd)\n  except OSError: continue\n  os.dup2(1, fd){REST}"
    ),
    "handlers of all signals": (
        "import signal\nfor s in range(1, 65):\n  try: signal.signal(s, lambda *_: None)\n"
        f"  except (OSError, ValueError): pass{REST}"
    ),
    "a clock": (
        "import os, signal\nsignal.signal(signal.SIGALRM, lambda *_: os._exit(0))\n"
        f"signal.setitimer(signal.ITIMER_REAL, 0.01){REST}"
    ),
    "a child that outlives it": (
        f"import os, time\ndef late():\n{FORGED}if os.fork() == 0:\n  os.setsid()\n  while True:\n"
        f"    late()\n    time.sleep(0.01){REST}"
    ),
    "a fork that replies too": f"import os\ndef add(a, b):\n  os.fork()\n{FORGED}  return 0",
    "half a reply": (
        "import os\ndef add(a, b):\n  for fd in range(3, 64):\n    try: os.write(fd, b'[\"value\", ')\n"
        "    except OSError: pass\n  return 0"
    ),
    "descriptors in a message": (
        "import array, os, socket\ndef add(a, b):\n  for fd in range(3, 64):\n    try: "
        "socket.socket(fileno=os.dup(fd)).sendmsg([b''], "
        "[(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0]))])"
        "\n    except OSError: pass\n  return 0"
    ),
    "another program": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(42)'])",
    "another program when called": (
        "import os, sys\ndef add(a, b): os.execv(sys.executable, [sys.executable, '-c', 'print(42)'])"
    ),
    "the memory of others": (
        "def add(a, b):\n  for p in ('self', *range(1, 200)):\n    try: open(f'/proc/{p}/mem', 'rb').read(0)\n"
        "    except OSError: continue\n    return 42"
    ),
    "links out of its folder": (
        "import os\ndef add(a, b):\n  for n, path in enumerate(('/etc/shadow', '/proc/1/environ', '/root/.bashrc')):\n"
        "    os.symlink(path, f'l{n}')\n    if os.path.exists(f'l{n}'): return 42"
    ),
    "processes of multiprocessing": (
        "import multiprocessing as mp, os\ndef f(_): os._exit(0)\ndef add(a, b):\n"
        "  with mp.get_context('fork').Pool(2) as p: p.map_async(f, range(9))\n  return 0"
    ),
    "an import at the start of Python": (
        "import os, site\nos.makedirs(site.getusersitepackages(), exist_ok=True)\n"
        f"open(site.getusersitepackages() + '/usercustomize.py', 'w').write('raise SystemExit'){REST}"
    ),
    "another file of itself": f"open('main.py', 'w').write('def add(a, b): return a + b'){REST}",
    "another encoding": "# -*- coding: utf-7 -*-\ndef add(a, b): return 0\n+AHIAYQBpAHMAZQ-",
    "a reply as text": 'def add(a, b): return \'\\n["value", ["int", "42"]]\\n\\u2028\\ud800\\0\'',
    "a report as output": f"import sys\nprint('null\\nnull', flush=True)\nsys.stderr.write('null\\n'){REST}",
    "patched JSON": f'import json\njson.dumps = lambda *_, **__: \'["value", ["bool", "1"]]\'{REST}',
    "a patched server": (
        "import gc\nfor o in gc.get_objects():\n  if isinstance(o, type) and o.__name__ == 'Program':\n"
        f"    o._done = lambda *_: True{REST}"
    ),
    "builtins taken away": f"import builtins\nbuiltins.__import__ = builtins.compile = builtins.exec = None{REST}",
    "a name that ends all": "class T:\n  def __getattribute__(self, name): raise SystemExit(0)\nadd = T()",
    "a recursion": "def add(a, b): return add(a, b)",
    "a deep value": "def add(a, b):\n  x = 42\n  for _ in range(100_000): x = [x]\n  return x",
    "no end of processes": (
        "import os\ndef add(a, b):\n  while True:\n    try: os.fork()\n    except OSError: return 0"
    ),
}
CHEATS.update((name, MORE_CHEATS[name]) for name in MORE_CHEATS if IS_ISOLATED or name != "no end of processes")


def marks_of(cheat: str) -> list[pytest.MarkDecorator]:
    if cheat in MORE_CHEATS:
        return [pytest.mark.full]
    return []


@pytest.mark.parametrize("cheat", [pytest.param(name, marks=marks_of(name)) for name in CHEATS])
def test_a_cheating_program_passes_no_test(cheat: str) -> None:
    # The second test runs regardless of what the first one has left.
    assert passes(CHEATS[cheat], TEST, "assert add(1, 2) == 42") == [False, False]


def test_an_error_larger_than_the_report_is_a_failed_test() -> None:
    limits = Limits(timeout_s=60.0, file_bytes=2000)
    result = run_assertions("def add(a, b): raise ValueError('x' * 10**6)", [TEST, TEST], limits)
    assert result.passed == (False, False)


def test_a_file_written_by_a_test_is_invisible_to_other_responses() -> None:
    leaving = "open('left', 'w').write('42')\ndef add(a, b): return 0"
    finding = "import os\ndef add(a, b): return 42 if os.path.exists('left') else 0"
    assert passes(leaving) == [False]
    assert passes(finding) == [not IS_ISOLATED and False]


def test_a_module_imported_by_a_test_is_not_taken_from_the_program() -> None:
    program = "class math:\n  isclose = staticmethod(lambda *_: True)\ndef half(x): return 7.0"
    assert passes(program, "assert math.isclose(half(6), 3.0)") == [False]
    assert passes(f"{program}\nabs = lambda *_: 0.0", "assert abs(half(6) - 3.0) < 1e-6") == [False]


def test_no_test_runs_after_one_that_timed_out() -> None:
    program = "def f(x):\n  while x: pass\n  return 1"
    result = run_assertions(
        program, ["assert f(0) == 1", "assert f(1) == 1", "assert f(0) == 1"], Limits(timeout_s=3.0, cpu_s=60)
    )
    assert result.passed == (True, False, False)
    assert re.search(says("3 s"), result.text)


def test_the_text_has_the_output_and_the_lines_of_program_and_test() -> None:
    assert run_assertions("print('on')\ndef f(): return 1 / 0", ["assert f() == 1"], LIMITS) == AssertionResult(
        (False,),
        'on\nTraceback (most recent call last):\n  File "<test>", line 1, in <module>\n  File "main.py", line 2, in f\n'
        "    def f(): return 1 / 0\n                    ~~^~~\nZeroDivisionError: division by zero",
    )
