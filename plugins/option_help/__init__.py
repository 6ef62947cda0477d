"""Help on options: `--help`, and advice on unknown ones."""

PROVIDES = {"option help": {"text": "help:help_text", "list": "help:describe_options", "advice": "advice:advice"}}
