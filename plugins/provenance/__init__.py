"""Record of what a result depends on besides its options: versions of packages, git state of the code, and hardware."""

PROVIDES = {"run record": {"environment": "environment:write_environment"}}
