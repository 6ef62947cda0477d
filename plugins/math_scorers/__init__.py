"""Scorers of mathematical answers: GSM8K's number, and any answer by math-verify."""

PROVIDES = {
    "scorer": {
        "gsm8k": "scorers:gsm8k",
        "gsm8k_flexible": "scorers:gsm8k_flexible",
        "math": "scorers:math_answer",
    },
}
