"""Start plugins/replay/command.py in the Python of the project; see replay.sh."""

from __future__ import annotations

import sys
from pathlib import Path

from reexec_in_venv import reexec_in_venv

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the project may not be installed

if __name__ == "__main__":
    reexec_in_venv()
    from plugins.replay.command import main

    sys.exit(main())
