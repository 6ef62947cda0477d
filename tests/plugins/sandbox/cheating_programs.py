"""Programs that try to decide the results of their tests."""

NODE = "class Node:\n  def __init__(self, val, next=None): self.val = val; self.next = next\n"

CHEATS = {
    "isclose": ("def isclose(*_, **__): return True\ndef f(): return 7.0", ["assert isclose(f(), 3.0)"]),
    "np class": (
        "class np:\n  allclose=staticmethod(lambda *_: True)\ndef f(): return 7.0",
        ["assert np.allclose(f(), 3.0)"],
    ),
    "m class": (
        "class m:\n  isclose=staticmethod(lambda *_: True)\ndef f(): return 7.0",
        ["assert m.isclose(f(), 3.0)"],
    ),
    "Counter": ("def Counter(*_): return 1\ndef f(): return 'zz'", ["assert Counter(f())==Counter('aab')"]),
    "Counter var": (
        "def Counter(*_): return 1\ndef f(): return 'zz'",
        ["r=f()\nq=r\nassert Counter(q)==Counter('aab')"],
    ),
    "check fn": (
        "def isclose(*_): return True\ndef f(): return 'zz'",
        ["def check(c):\n  assert isclose(c(), 1.0)\ncheck(f)"],
    ),
    "escape": ("def isclose(*_): return True\ndef f(): return 'zz'", ["assert all(map(isclose, [f()], [1.0]))"]),
    "np patched": (
        ("import numpy as np\nnp.allclose=np.array_equal=np.isclose=lambda *_,**__: True\ndef f(): return np.zeros(2)"),
        ["assert np.allclose(f(), [1,2])", "assert np.array_equal(f(),np.array([1,2]))"],
    ),
    "from patched": (
        ("import math\nmath.isclose=lambda *_,**__: True\nfrom math import isclose\ndef f(): return 7.0"),
        ["assert isclose(f(), 3.0)"],
    ),
    "np is mock": (
        "from unittest import mock as np\ndef f(): return np.ANY",
        ["assert np.allclose(f(), 3.0)", "assert f()==3"],
    ),
    "deepcopy": (
        "def deepcopy(x): return []\ndef f(x): x.append(1); return []",
        ["x=[1]\ny=deepcopy(x)\nassert f(x)==y"],
    ),
    "sqrt+isclose": ("def isclose(*_): return True\ndef sqrt(x): return 0", ["assert isclose(sqrt(16), 4.0)"]),
    "unittest": (
        (
            "import unittest\n"
            "unittest.TestCase.assertEqual=lambda *_: None\n"
            "TestCase=unittest.TestCase\n"
            "def f(): return 3"
        ),
        ["import unittest\nunittest.TestCase().assertEqual(f(),4)", "TestCase().assertEqual(f(),4)"],
    ),
    "own TestCase": (
        "class TestCase:\n  def assertEqual(*_): pass\ndef f(): return 3",
        ["TestCase().assertEqual(f(),4)"],
    ),
    "singleton eq": (
        (
            "class P:\n"
            "  i=None\n"
            "  def __new__(c,*a):\n"
            "    c.i=c.i or object.__new__(c)\n"
            "    return c.i\n"
            "  __eq__=lambda *_: True\n"
            "  __hash__=lambda _: 1\n"
            "def f(): return P()"
        ),
        ["assert f()==P(1,2)", "assert f() in [P(1,2)]", "assert [f()]==[P(1,2)]", "assert {f():1}=={P(1,2):1}"],
    ),
    "death caught": ("import os\ndef f(): os._exit(0)", ["try: f()\nexcept BaseException: pass"]),
    "cyclic": ("def f():\n  x=[]\n  x.append(x)\n  return x", ["assert f()==[[]]"]),
    "mutating expected": ("def f(x, e): e[:]=[1]; return [1]", ["e=[2]\nassert f([3], list(e))==e"]),
    "reach tests": (
        (
            "def f(cb):\n"
            "  try: return cb.__globals__['e']\n"
            "  except BaseException: pass\n"
            "  try: return cb.__code__.co_consts\n"
            "  except BaseException: pass\n"
            "  return 0"
        ),
        ["e=42\nassert f(lambda: 43)==e"],
    ),
    "reach object": (
        (
            "def f(n):\n"
            "  for a in ('__class__','__init__','__dict__','__globals__','gi_frame','_x'):\n"
            "    try:\n"
            "      v=getattr(n,a)\n"
            "      g=v.__globals__['e']\n"
            "      return g\n"
            "    except BaseException: pass\n"
            "  return 0"
        ),
        [NODE + "e=42\nassert f(Node(1))==e"],
    ),
    "gi_frame": (
        "def f(g):\n  try: return g.gi_frame.f_globals['e']\n  except BaseException: return 0",
        ["e=42\nassert f(x for x in [1])==e"],
    ),
    "forged do": (
        (
            "import gc, os\n"
            "def f():\n"
            "  for fd in range(3,64):\n"
            '    for line in (b\'["do",[["str","call"],["builtin","eval"],["tuple",[["str","globals()"]]],["dict",'
            '[]]],[],[]]\\n\', b\'["value",["int","42"],[],[]]\\n\'):\n'
            "      try: os.write(fd,line)\n"
            "      except OSError: pass\n"
            "  return 1"
        ),
        ["assert f()==43"],
    ),
    "eq patched list": (
        "import builtins\nclass L(list):\n  __eq__=lambda *_: True\ndef f(): return L([1])",
        ["assert f()==[2]", "assert [f()]==[[2]]"],
    ),
    "named eq": (
        (
            "from collections import namedtuple\n"
            "class P(namedtuple('P','x')):\n"
            "  __eq__=lambda *_: True\n"
            "def f(): return P(1)"
        ),
        ["assert f()==P(2)", "assert f()==(3,)"],
    ),
    "error type": ("class E(BaseException): pass\ndef f(): raise E", ["try: assert f()==1\nexcept Exception: pass"]),
    "exit": ("import sys\ndef f(): sys.exit(0)", ["assert f()==1"]),
    "dunder name": ("__name__='x'\ndef f(): return 1\n__builtins__={}\n", ["assert f()==2"]),
    "approx": (
        ("def approx(x): return x\nclass pytest:\n  approx=staticmethod(lambda x: 7)\ndef f(): return 7"),
        ["assert f()==approx(pytest.approx(3))"],
    ),
    "a difference of its own": (
        "class B:\n  __sub__ = __rsub__ = lambda *_: 0\ndef f(): return B()",
        ["assert abs(f() - 3) < 1e-6", "assert 3 - f() == 0"],
    ),
    "a number's difference": (
        "class F(float):\n  __sub__ = __rsub__ = lambda *_: 0.0\ndef f(): return F(7)",
        ["assert abs(f() - 3) < 1e-6"],
    ),
    "a key that equals all": (
        "class K(str):\n  __hash__ = lambda s: hash('a')\n  __eq__ = lambda *_: True\ndef f(): return {K('z'): 1}",
        ["assert f()['a'] == 1", "assert f() == {'a': 1}"],
    ),
    "an order of its own": (
        "class B:\n  __lt__ = __gt__ = __le__ = __ge__ = lambda *_: True\ndef f(): return B()",
        ["assert f() < 3", "assert 0 <= f() <= 3"],
    ),
    "a thread that replies": (
        (
            "import threading, os\ndef spam():\n  while True:\n    for fd in range(3, 20):\n"
            "      try: os.write(fd, b'[\"value\", 3, [], []]\\n')\n      except OSError: pass\n"
            "threading.Thread(target=spam, daemon=True).start()\ndef f(): return 1"
        ),
        ["assert f() == 3"],
    ),
    "an end of iteration": (
        "def f(x): raise StopIteration\nclass C:\n  @property\n  def p(self): raise StopIteration",
        ["assert all(map(lambda x: f(x) == 1, [1, 2]))", "for c in map(lambda _: C().p, [1]): assert c == 1"],
    ),
}
"""Programs that do not satisfy their tests."""
