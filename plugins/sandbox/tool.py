"""Python in the sandbox as a tool of a policy."""

from __future__ import annotations

from agents.tools import Tool
from plugins.sandbox.sandbox import Limits, run_python_async


def python_tool(limits: Limits | None = None) -> Tool:
    """Make a tool that runs Python in the sandbox. docs/security.md describes its boundary."""

    async def python(code: str) -> str:
        """Run a Python program and give what it prints. Nothing is kept from one call to the next.

        Args:
            code: the whole program
        """
        return (await run_python_async(code, limits=limits)).text or "(it printed nothing)"

    return Tool.from_function(python)
