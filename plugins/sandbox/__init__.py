"""Sandbox for programs that a policy wrote: a process with limits, in namespaces without network and files.

These load it: `agent.func_path=env:code`, `agents.tools.python_tool`, and the data sources of programming problems
(verl's `apps`, `codecontests`, `codeforces` and `taco`).
"""

PROVIDES = {
    "tool": {"python": "tool:python_tool"},
    "environment": {"code": "code_environment:__file__"},
    "score function": {
        "apps": "code_tests:code_score",
        "codecontests": "code_tests:code_score",
        "codeforces": "code_tests:code_score",
        "taco": "code_tests:code_score",
    },
}
