"""Word problems with a calculator, for GSM8K and for any data whose label ends in `#### N` or is a number.

The policy may call the tool any number of times. Its final response contains `#### N`.
"""

from __future__ import annotations

import ast
import operator
from typing import Any, ClassVar

from agents.tools import ToolAgentInstance
from components.rewards.scorers import get_scorer

# Limits that suffice for word problems, and without which an expression such as 9**9**9 would run for ever.
LONGEST = 200
"""Maximum number of characters of an expression."""
LARGEST = 1e100
"""Maximum absolute value of a number."""
LARGEST_POWER = 64
"""Maximum absolute value of an exponent."""

_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculator(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and brackets, such as (3 + 4) * 2.50
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters; write at most {LONGEST}")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:  # before Python 3.11.4 a null byte raised ValueError
        raise ValueError(f"{expression!r} is not an expression; write one such as (3 + 4) * 2") from error
    value = _value(tree)
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value: Any = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left = _value(node.left)
        right = _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > LARGEST_POWER:
            raise ValueError(f"the exponent {right} is too large; use at most {LARGEST_POWER}")
        value = _OPERATORS[type(node.op)](left, right)
    else:
        raise ValueError(f"{ast.unparse(node)!r} is not arithmetic; use numbers with + - * / // % ** and brackets")
    # `not <=` instead of `>`, so that NaN is rejected too. A root of a negative number is complex.
    if isinstance(value, complex) or not abs(value) <= LARGEST:
        raise ValueError(f"{ast.unparse(node)!r} is too large, or not a real number")
    return value


class AgentInstance(ToolAgentInstance):
    """Environment with the calculator tool. The scorer is `gsm8k`: 1 for the label's number after the last `####`."""

    tools: ClassVar = (calculator,)

    async def score(self, answer: str, label: Any) -> float:
        """Return 1.0 for the right number, else 0.0."""
        score = get_scorer("gsm8k")(answer, str(label))
        assert isinstance(score, float)  # other scorers may return parts
        return score
