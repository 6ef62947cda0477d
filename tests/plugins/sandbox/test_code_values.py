"""Programs that use more of Python than plain values, and programs that try to decide the results of their tests."""

import time
from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet

from plugins.sandbox import code_tests, sandbox
from plugins.sandbox.code_tests import code_score, run_assertions
from plugins.sandbox.sandbox import Limits
from tests.plugins.sandbox.cheating_programs import CHEATS
from tests.plugins.sandbox.honest_programs import HONEST

pytestmark = pytest.mark.full

LIMITS = Limits(timeout_s=60.0)
IS_ISOLATED = not sandbox.isolation_fault()
DEFAULT = (
    "sort in place",
    "nested in place",
    "callback",
    "datetime",
    "decimal",
    "generator",
    "custom class",
    "numpy",
    "main guard",
    "own error",
    "linked list",
    "isclose",
    "m",
    "async",
    "np class",
    "m class",
    "Counter",
    "np patched",
    "deepcopy",
    "singleton eq",
    "death caught",
    "reach tests",
    "forged do",
    "unittest",
)
"""Cases of the default tier. All others belong to the full tier."""


def tiered(cases: Iterable[str]) -> list[ParameterSet]:
    """Return the cases, marked by their tier."""
    return [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.full]) for name in cases]


@pytest.mark.parametrize("case", tiered(HONEST))
def test_an_honest_program_passes(case: str) -> None:
    program, tests = HONEST[case]
    assert run_assertions(program, tests, LIMITS).passed == (True,) * len(tests)


def test_large_values_and_many_calls_are_exchanged_in_time() -> None:
    tests = [
        "x = list(range(100_000, 0, -1))\nassert f(x) == sorted(x)",
        "for i in range(500): assert f([i, 2])[1] >= 2",
    ]
    assert run_assertions("def f(x): return sorted(x)", tests, LIMITS).passed == (True, True)


@pytest.mark.parametrize("case", tiered(CHEATS))
def test_a_program_cannot_decide_comparisons_of_its_tests(case: str) -> None:
    program, tests = CHEATS[case]
    assert run_assertions(program, tests, LIMITS).passed == (False,) * len(tests)


LATE = {
    "huge int": ("def f(): return 7**(10**6)", ["assert f()*f()*f()%f()==str(f()) or 10**(10**9)==f()"]),
    "hang caught loop": (
        "import time\ndef f(): time.sleep(1000)",
        ["while True:\n  try: f()\n  except BaseException: break"],
    ),
    "late top": ("import time\ntime.sleep(1000)", ["assert f()==1"]),
    "hang caught": ("def f():\n  while True: pass", ["try: f()\nexcept BaseException: pass"]),
}
"""Programs and tests that exceed the time of a test. Some tests catch all errors."""


@pytest.mark.full
@pytest.mark.parametrize("case", LATE)
def test_a_test_that_catches_all_errors_still_times_out(case: str) -> None:
    program, tests = LATE[case]
    result = run_assertions(program, tests, Limits(timeout_s=2.0, cpu_s=60))
    assert result.passed == (False,)
    assert "2 s" in result.text


ENDS = {
    "atexit": (
        "import atexit,time\natexit.register(time.sleep,300)\ndef f(): return 1",
        ["assert f()==1", "assert f()==1", "assert f()==1"],
    ),
    "thread": (
        ("import threading,time\nthreading.Thread(target=time.sleep,args=(300,)).start()\ndef f(): return 1"),
        ["assert f()==1", "assert f()==1", "assert f()==1"],
    ),
    "fork": (
        "import os,time\nif os.fork()==0:\n  time.sleep(300)\ndef f(): return 1",
        ["assert f()==1", "assert f()==1", "assert f()==1"],
    ),
    "signals": (
        (
            "import signal\n"
            "for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(s, signal.SIG_IGN)\n"
            "signal.pthread_sigmask(signal.SIG_BLOCK, range(1,65))\n"
            "def f(): return 1"
        ),
        ["assert f()==1", "assert f()==1", "assert f()==1"],
    ),
    "tail output": ("import atexit\natexit.register(lambda: print('x'*10**7))\ndef f(): return 1", ["assert f()==1"]),
}
"""Correct programs that do not end by themselves or write without end."""


@pytest.mark.parametrize("case", ENDS)
def test_a_verdict_does_not_depend_on_the_exit_of_the_program(case: str) -> None:
    program, tests = ENDS[case]
    began = time.monotonic()
    assert run_assertions(program, tests, LIMITS).passed == (True,) * len(tests)
    # Far less than the limit of one test.
    assert time.monotonic() - began < LIMITS.timeout_s


def test_all_tests_of_a_response_end_before_the_time_of_its_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = code_tests.TOTAL_S + code_tests.START_S + code_tests.GRACE_S
    assert longest < 60.0
    monkeypatch.setattr(code_tests, "TOTAL_S", 2.0)
    hanging = "import time\ndef f(x): time.sleep(3600)\nif __name__ == '__main__': f(1)"
    began = time.monotonic()
    for truth in ({"assert_case": ["assert f(1)"] * 10}, {"inputs": ["1"] * 10, "outputs": ["1"] * 10}):
        assert code_score("apps", hanging, truth) == {"score": 0.0, "acc": 0.0}
    assert time.monotonic() - began < 60.0
