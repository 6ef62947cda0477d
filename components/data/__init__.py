"""Where training data comes from: tasks, prompts, scorers, demonstrations, and the stream the loop reads."""
