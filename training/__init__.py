"""Code that all recipes share: options, launch, checkpoints, evaluation, tracking, terminal and report."""
