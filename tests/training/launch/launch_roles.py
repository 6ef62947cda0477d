"""Two workloads without a model, for jobs started by tests."""


class Works:
    """A trainer that succeeds."""

    def run(self) -> None:
        """Do nothing."""


class Fails:
    """A trainer that fails."""

    def run(self) -> None:
        """Raise an error."""
        raise ValueError("there are no numbers; set numbers=FILE")
