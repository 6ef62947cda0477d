"""Scorers of mathematical answers. See `Scorer` for their arguments and results."""

from __future__ import annotations

import logging
import re
from decimal import Decimal

from components.rewards.scorers import Package, needs

# A number as people write it: commas between groups of three, a decimal point; sign and dollar in either order.
_DIGITS = r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
# The text after it must not make it another number: `3/4` is not 3, and `1.2.3` is not 1.2.
# Possessive quantifiers, because backtracking over a long run of spaces would take quadratic time or more.
_STATED_NUMBER = re.compile(rf"\s*+(?:\\?\$)?+\s*+(?P<sign>[-+−]?+)\s*+(?:\\?\$)?+\s*+{_DIGITS}(?!\s*[/^]|[.,:]?[0-9])")
# In running text a minus is a sign only if no operand of a subtraction is before it: `10-3` ends in 3.
_ANY_NUMBER = re.compile(rf"(?P<sign>(?<![\w)])[-−](?=\\?\$?[0-9.]))?(?:\\?\$)?{_DIGITS}")


def gsm8k(response: str, label: str) -> float:
    """Return 1.0 if the number after the last `####` in the response equals the label's number.

    Args:
        response: any text.
        label: a solution of GSM8K, which ends in `#### N`, or only the number.

    Raises:
        ValueError: the label has no number.
    """
    label_value = _label_value(label)
    _, separator, answer = response.rpartition("####")
    if not separator:
        return 0.0
    match = _STATED_NUMBER.match(answer)
    return float(match is not None and _value(match) == label_value)


def gsm8k_flexible(response: str, label: str) -> float:
    """Return 1.0 if the last number anywhere in the response equals the label's number.

    Args:
        response: any text.
        label: as in `gsm8k`.

    Raises:
        ValueError: the label has no number.
    """
    label_value = _label_value(label)
    matches = list(_ANY_NUMBER.finditer(response))
    return float(bool(matches) and _value(matches[-1]) == label_value)


@needs(Package("math_verify", "math-verify", "math"))
def math_answer(response: str, label: str) -> float:
    r"""Return 1.0 if the answer in the response is mathematically equal to the label's, as decided by math-verify.

    Args:
        response: any text. The last \boxed{} takes precedence over other formulas, and these over plain numbers.
        label: an answer in LaTeX or plain text, or a solution with \boxed{}.

    Raises:
        ValueError: the label has no mathematical answer.
    """
    from math_verify import parse, verify

    # math-verify warns that it has no timeout of its own here. The process that runs a scorer has one.
    for module in ("parser", "grader"):
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    # Without a delimiter, math-verify would read only numbers from a label such as \sqrt{2}.
    marked_label = label if "$" in label or "\\boxed" in label else f"\\boxed{{{label}}}"
    gold = parse(marked_label, parsing_timeout=0)
    if not gold:
        raise ValueError(f"the label {label!r} holds no mathematical answer; set the label key to the field that does")
    return float(bool(verify(gold, parse(response, parsing_timeout=0), timeout_seconds=0)))


def _value(match: re.Match[str]) -> Decimal:
    # Decimal instead of float, which would round long numbers so that different ones are equal.
    number = Decimal(match["digits"].replace(",", ""))
    return number.copy_negate() if match["sign"] in ("-", "−") else number


def _label_value(label: str) -> Decimal:
    answer = label.rpartition("####")[2]
    match = _STATED_NUMBER.match(answer)
    if match is None or answer[match.end() :].strip(" \t\r\n.%$"):
        raise ValueError(
            f"the label {label[-80:]!r} is neither a number nor a solution that ends in '#### N'; set data.label_key "
            "to the column with the labels"
        )
    return _value(match)
