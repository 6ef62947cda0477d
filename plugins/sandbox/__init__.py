"""Programs that a policy wrote, run on a small machine of their own: a process with limits, without network or files.

`agent.func_path=env:code`, `agents.tools.python_tool` and the data sources of programming problems (verl's `apps`,
`codecontests`, `codeforces` and `taco`) load it.
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
