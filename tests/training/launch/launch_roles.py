"""Two workloads without a model, for jobs that a test starts."""


class Works:
    """Ends well."""

    def run(self) -> None:
        """Nothing is to be done."""


class Fails:
    """Does not."""

    def run(self) -> None:
        """Give up."""
        raise ValueError("there are no numbers; set numbers=FILE")
