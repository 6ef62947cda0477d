"""Write the report of one or more runs: `python scripts/report.py runs/a [runs/b ...] [--out FILE]`.

It reads the run folders, also of runs in progress, and writes one HTML file that needs no network.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from reexec_in_venv import reexec_in_venv

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the project may not be installed


def main(arguments: list[str] | None = None) -> int:
    """Write the report. Return the exit code: 0 written, 1 the file cannot be written, 2 there is no such run."""
    from components.process.streams import accept_any_text
    from plugins.report.page import write_report

    accept_any_text()
    parser = argparse.ArgumentParser(prog="report.py", description="Write the report of runs into one HTML file.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, such as runs/a")
    parser.add_argument(
        "--out",
        type=Path,
        help="file to write (default: report.html in the folder of the run; of several, in the parent of the first)",
    )
    options = parser.parse_args(arguments)
    missing = [str(run) for run in options.runs if not run.is_dir()]
    if missing:
        print(f"report.py: no such folder: {', '.join(missing)}; name the folders of runs", file=sys.stderr)
        return 2
    folder = options.runs[0].resolve()
    if len(options.runs) > 1:
        folder = folder.parent
    out = options.out or folder / "report.html"
    if out.is_dir():
        out = out / "report.html"
    try:
        size = write_report(options.runs, out)
    except ValueError as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"report.py: {out} cannot be written: {error}", file=sys.stderr)
        return 1
    print(f"report: {out} ({size / 1e6:.2f} MB)")
    return 0


if __name__ == "__main__":
    reexec_in_venv()
    sys.exit(main())
