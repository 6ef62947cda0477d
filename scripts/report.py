"""The report of one run, or of several beside each other: `python scripts/report.py runs/a [runs/b ...] [--out FILE]`.

Reads what the runs left, also while they continue, and writes one HTML file that opens without a network.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from reexec_in_venv import reexec_in_venv

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the project may not be installed


def main(arguments: list[str] | None = None) -> int:
    """Write the report; returns the exit code: 0 written, 1 the disk said no, 2 no such run."""
    from components.process.streams import accept_any_text
    from plugins.report.page import write_report

    accept_any_text()
    parser = argparse.ArgumentParser(prog="report.py", description="Write the report of runs into one HTML file.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run, such as runs/a")
    parser.add_argument(
        "--out",
        type=Path,
        help="the file to write (default: report.html in the run's folder; of several, in the folder above the first)",
    )
    given = parser.parse_args(arguments)
    missing = [str(run) for run in given.runs if not run.is_dir()]
    if missing:
        print(f"report.py: no such folder: {', '.join(missing)}; name the folders of runs", file=sys.stderr)
        return 2
    first = given.runs[0].resolve()
    out = given.out or (first if len(given.runs) == 1 else first.parent) / "report.html"
    if out.is_dir():
        out = out / "report.html"
    try:
        size = write_report(given.runs, out)
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
