"""Help on options: `--help`, and advice on unknown ones."""

PROVIDES = {"option help": {"text": "help:requested_help", "list": "help:describe_options", "advice": "advice:advice"}}
