"""Programs that satisfy their tests and use more of Python than plain values."""

NODE = "class Node:\n  def __init__(self, val, next=None): self.val = val; self.next = next\n"

HONEST = {
    "sort in place": ("def f(x): x.sort()", ["xs=[3,1,2]\nassert f(xs) is None\nassert xs==[1,2,3]"]),
    "nested in place": (
        "def f(g):\n  for r in g: r.reverse()\n  g.append([])",
        ["g=[[1,2],[3,4]]\nf(g)\nassert g==[[2,1],[4,3],[]]"],
    ),
    "dict and set": (
        "def f(d, s): d['a'] = d.pop('b'); s.add(7)",
        ["d={'b':1}\ns={1}\nf(d,s)\nassert d=={'a':1} and s=={1,7}"],
    ),
    "same object back": ("def f(x): x.append(1); return x", ["x=[]\nassert f(x) is x and x==[1]"]),
    "kept by the program": (
        (
            "class S:\n"
            "  def __init__(self,x): self.x=x\n"
            "  def go(self): self.x.sort()\n"
            "  def n(self): return len(self.x)"
        ),
        ["x=[2,1]\ns=S(x)\ns.go()\nassert x==[1,2]\nx.append(9)\nassert s.n()==3"],
    ),
    "alias of internals": (
        "class S:\n  def __init__(self): self._x=[]\n  def x(self): return self._x",
        ["s=S()\ns.x().append(4)\nassert s.x()==[4]"],
    ),
    "callback": ("def ap(f, x): return [f(i) for i in x]", ["assert ap(lambda i: i*2, [1,2])==[2,4]"]),
    "callback error": (
        "def ap(f):\n  try: f()\n  except ValueError as e: return str(e)",
        ["def bad(): raise ValueError('no')\nassert ap(bad)=='no'"],
    ),
    "callback error through": (
        "def ap(f): return f()",
        [
            (
                "def bad(): raise KeyError('no')\n"
                "try:\n"
                "  ap(bad)\n"
                "  assert False\n"
                "except KeyError as e:\n"
                "  assert e.args==('no',)"
            )
        ],
    ),
    "callback counts": (
        "def retry(f, n):\n  for _ in range(n): f()",
        ["c=[]\nretry(lambda: c.append(1), 3)\nassert len(c)==3"],
    ),
    "decorator": (
        "def twice(f):\n  def g(*a): return f(f(*a))\n  return g",
        ["@twice\ndef inc(x): return x+1\nassert inc(1)==3"],
    ),
    "builtin callback": (
        "def ap(f, x): return f(x)",
        ["assert ap(sorted,[2,1])==[1,2]\nassert ap(int,'3')==3\nassert ap(len,'abc')==3"],
    ),
    "key": ("def srt(x, key): return sorted(x, key=key)", ["assert srt(['bb','a'], key=len)==['a','bb']"]),
    "datetime": (
        (
            "import datetime as dt\n"
            "def f(): return dt.datetime(2020,1,2,3), dt.date(2020,1,1), dt.timedelta(days=1), dt.time(3)"
        ),
        [
            (
                "import datetime\n"
                "assert f()==(datetime.datetime(2020,1,2,3), datetime.date(2020,1,1), datetime.timedelta(1), "
                "datetime.time(3))"
            )
        ],
    ),
    "datetime in": (
        "def nxt(d):\n  import datetime\n  return d + datetime.timedelta(days=1)",
        ["from datetime import date\nassert nxt(date(2020,1,31))==date(2020,2,1)"],
    ),
    "datetime alias": (
        "from datetime import datetime, date\ndef f(): return date(2020,1,2)",
        ["assert f()==date(2020,1,2)\nassert datetime(2020,1,2).date()==f()"],
    ),
    "aware": (
        "import datetime as dt\ndef f(): return dt.datetime(2020,1,1,tzinfo=dt.timezone.utc)",
        [
            (
                "import datetime\n"
                "assert f().tzinfo is not None and f()==datetime.datetime(2020,1,1,tzinfo=datetime.timezone.utc)"
            )
        ],
    ),
    "decimal": (
        ("from decimal import Decimal\nfrom fractions import Fraction\ndef f(): return Decimal('1.10'), Fraction(1,3)"),
        ["assert f()==(Decimal('1.1'), Fraction(1,3))"],
    ),
    "sets": (
        "def f(): return {1,2}, frozenset([3]), {(1,2): {'a'}}",
        ["assert f()==({1,2}, frozenset({3}), {(1,2):{'a'}})"],
    ),
    "generator": (
        "def g():\n  x = 0\n  while True:\n    x += (yield x) or 1",
        [
            (
                "import types\n"
                "k=g()\n"
                "assert isinstance(k, types.GeneratorType)\n"
                "assert next(k)==0 and k.send(5)==5 and next(k)==6"
            )
        ],
    ),
    "generator to function": (
        (
            "def nat():\n"
            "  n=0\n"
            "  while True:\n"
            "    yield n\n"
            "    n+=1\n"
            "def take(it,n): return [next(it) for _ in range(n)]"
        ),
        ["assert take(nat(),3)==[0,1,2]\nassert take(iter([5,6]),2)==[5,6]"],
    ),
    "custom class": (
        (
            "class P:\n"
            "  def __init__(s,x): s.x=x\n"
            "  def __add__(s,o): return P(s.x+o.x)\n"
            "  def __len__(s): return s.x\n"
            "  def __contains__(s,i): return i==s.x\n"
            "  def __lt__(s,o): return s.x<o.x\n"
            "  def __repr__(s): return f'P({s.x})'"
        ),
        [
            (
                "p=P(1)+P(2)\n"
                "assert p.x==3 and len(p)==3 and 3 in p and 4 not in p and repr(p)=='P(3)' and P(1)<P(2) and "
                "sorted([P(2),P(1)])[0].x==1\n"
                "assert isinstance(p, P) and not isinstance(3, P) and type(p).__name__=='P'\n"
                "p.x=9\n"
                "assert p.x==9 and vars(p)=={'x':9}"
            )
        ],
    ),
    "inheritance": (
        "class A:\n  def f(self): return 'a'\nclass B(A):\n  pass",
        ["assert issubclass(B, A) and isinstance(B(), A) and B().f()=='a'"],
    ),
    "context manager": (
        "class C:\n  def __enter__(s): s.o=1; return s\n  def __exit__(s,*a): s.o=0",
        ["with C() as c:\n  assert c.o==1\nassert c.o==0"],
    ),
    "numpy": (
        "import numpy as np\ndef f(a): a *= 2; return a.sum(), a.astype(np.float32)",
        [
            (
                "import numpy\n"
                "a=numpy.arange(3)\n"
                "s,b=f(a)\n"
                "assert s==6 and (a==[0,2,4]).all() and b.dtype==numpy.float32 and np.allclose(b,[0,2,4])"
            )
        ],
    ),
    "numpy scalar": (
        "import numpy as np\ndef f(): return np.mean([1,2]), np.bool_(True)",
        ["assert f()[0]==1.5 and f()[1]"],
    ),
    "recursion": ("def fib(n): return n if n<2 else fib(n-1)+fib(n-2)", ["assert fib(15)==610"]),
    "state": ("n=0\ndef inc():\n  global n\n  n+=1\n  return n", ["assert n==0\ninc()\ninc()\nassert n==2"]),
    "main guard": ("def f(): return 1\nif __name__=='__main__':\n  print(f(), input())", ["assert f()==1"]),
    "messages": ("def f(): return 1", ["assert f()==1, f'got {f()}'"]),
    "own error": (
        (
            "class Bad(ValueError):\n"
            "  def __init__(s, code): super().__init__(f'code {code}'); s.code=code\n"
            "def f(): raise Bad(7)"
        ),
        [
            ("try:\n  f()\n  assert False\nexcept Bad as e:\n  assert e.code==7 and 'code 7' in str(e)"),
            "try:\n  f()\n  assert False\nexcept ValueError as e:\n  assert str(e)=='code 7'",
        ],
    ),
    "own error chain": (
        "class A(Exception): pass\nclass B(A): pass\ndef f(): raise B('x')",
        ["try:\n  f()\n  assert False\nexcept A: pass"],
    ),
    "zero division": (
        "def f(): return 1/0",
        [
            "import pytest\nwith pytest.raises(ZeroDivisionError): f()",
            "try:\n  f()\nexcept ZeroDivisionError: pass\nelse: assert False",
        ],
    ),
    "key error": (
        "def f(): return {}['k']",
        ["try:\n  f()\n  assert 0\nexcept KeyError as e:\n  assert e.args[0]=='k'"],
    ),
    "unittest": (
        "def f(): return 3",
        [
            (
                "import unittest\n"
                "class T(unittest.TestCase):\n"
                "  def test(self): self.assertEqual(f(), 3)\n"
                "  def test_b(self): self.assertAlmostEqual(f(), 3.0000000001)\n"
                "r=unittest.TextTestRunner(stream=open('/dev/null',"
                "'w')).run(unittest.defaultTestLoader.loadTestsFromTestCase(T))\n"
                "assert r.wasSuccessful() and r.testsRun==2"
            )
        ],
    ),
    "linked list": (
        (
            "def rev(h):\n"
            "  p=None\n"
            "  while h: h.next, p, h = p, h, h.next\n"
            "  return p\n"
            "def cyc(h):\n"
            "  s=set()\n"
            "  while h:\n"
            "    if h in s: return True\n"
            "    s.add(h); h=h.next\n"
            "  return False"
        ),
        [
            NODE
            + (
                "h=Node(1,Node(2,Node(3)))\n"
                "r=rev(h)\n"
                "assert r.val==3 and r.next.val==2 and r.next.next is h and h.next is None\n"
                "assert not cyc(r)\n"
                "h.next=r\n"
                "assert cyc(r)"
            )
        ],
    ),
    "namedtuple": (
        "from collections import namedtuple\nP=namedtuple('P','x y')\ndef f(): return P(1,2)",
        ["assert f().x==1 and f()==(1,2) and f()==P(1,2)"],
    ),
    "counter": (
        (
            "from collections import Counter, defaultdict, OrderedDict, deque\n"
            "def f(s): return Counter(s)\n"
            "def g():\n"
            "  d=defaultdict(list); d['a'].append(1); return d\n"
            "def h(): return deque([1,2],maxlen=2)"
        ),
        [
            (
                "assert f('aab').most_common(1)==[('a',2)] and f('a')==Counter('a')\n"
                "assert g()=={'a':[1]} and g()['zz']==[]\n"
                "d=h(); d.append(3); assert list(d)==[2,3]"
            )
        ],
    ),
    "isclose": (
        "from math import isclose, sqrt\ndef f(x): return sqrt(x)",
        ["assert isclose(f(4), 2.0) and sqrt(f(16))==2"],
    ),
    "own sqrt": ("from math import isclose\ndef sqrt(x): return x**.5", ["assert isclose(sqrt(16), 4.0)"]),
    "own gcd": (
        "def gcd(a,b):\n  while b: a,b=b,a%b\n  return a\ndef other(x): return x",
        ["assert gcd(12,18)==6\nassert gcd(7,3)==1", "xs=[4,6]\nassert gcd(*xs)==2\nassert other(1)==1"],
    ),
    "m": ("import math as m\ndef f(): return 3.0", ["assert m.isclose(f(),3.0)"]),
    "async": (
        "import asyncio\nasync def f(x):\n  await asyncio.sleep(0)\n  return x+1",
        ["import asyncio\nassert asyncio.run(f(1))==2"],
    ),
    "closure": (
        "def mk():\n  n=[0]\n  def inc(): n[0]+=1; return n[0]\n  return inc",
        ["c=mk()\nassert c()==1 and c()==2\nassert mk()()==1"],
    ),
    "stringio": ("def rd(f): return [l.strip() for l in f]", ["import io\nassert rd(io.StringIO('a\\nb'))==['a','b']"]),
    "types": ("def f(x): return type(x)", ["assert f(3) is int and f([])==list"]),
    "lru": (
        ("from functools import lru_cache\n@lru_cache(None)\ndef f(n): return n if n<2 else f(n-1)+f(n-2)"),
        ["assert f(80)==23416728348467685"],
    ),
    "property": (
        (
            "class A:\n"
            "  @property\n"
            "  def p(self): return 5\n"
            "  @classmethod\n"
            "  def c(cls): return cls()\n"
            "  @staticmethod\n"
            "  def s(x): return x"
        ),
        ["assert A().p==5 and A.c().p==5 and A.s(3)==3"],
    ),
    "matrix in place": (
        "def rot(m):\n  m[:] = [list(r) for r in zip(*m[::-1])]",
        ["m=[[1,2],[3,4]]\nrot(m)\nassert m==[[3,1],[4,2]]"],
    ),
    "lock": ("import threading\nL=threading.Lock()\ndef f():\n  with L: return 1", ["assert f()==1"]),
    "sys.exit in function": (
        "import sys\ndef f(): sys.exit(3)",
        [("try:\n  f()\n  assert False\nexcept SystemExit as e:\n  assert e.code==3 or e.args==(3,)")],
    ),
    "star args": ("def f(*a, k=1, **kw): return a, k, kw", ["assert f(1,2,k=3,z=4)==((1,2),3,{'z':4})"]),
    "complex": (
        "def f(): return 1+2j, b'x', bytearray(b'y'), range(3), None, ..., 10**400",
        ["r=f()\nassert r[:5]==(1+2j,b'x',bytearray(b'y'),range(3),None) and r[6]==10**400"],
    ),
}
"""Programs that satisfy their tests."""
