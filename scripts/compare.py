"""Start plugins/replay/compare.py in the Python of the project; see compare.sh."""

from __future__ import annotations

import sys
from pathlib import Path

from reexec_in_venv import reexec_in_venv

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the project may not be installed

if __name__ == "__main__":
    reexec_in_venv()
    from plugins.replay.compare import main

    sys.exit(main())
