"""What every run has, whatever it trains: options, launch, checkpoints, evaluation, tracking, terminal, report."""
