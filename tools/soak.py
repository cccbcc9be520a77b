"""Soaks a server: mixed load, clients that leave, hostile grammars, a tight budget, and an engine
that is killed or frozen every 20 s. Stops with a status at the first promise that is broken.

    python tools/soak.py [--seconds 600]

The load and the promises are in tests/soak.py.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / "tests")]

from soak import soak  # noqa: E402

HEARTBEAT_TIMEOUT = 1  # seconds: on a machine that does nothing else
LONGEST_RECOVERY = 5.0  # seconds, the load of the bundled model included
MOST_GROWTH = 10.0  # MB of the server, from the second quarter to the last


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    report = asyncio.run(soak(parser.parse_args().seconds, HEARTBEAT_TIMEOUT))
    print("\n".join(report.lines()))
    slow = [taken for _, taken in report.recoveries if taken > LONGEST_RECOVERY]
    if slow:
        print(f"broken: {len(slow)} times serving again took more than {LONGEST_RECOVERY:g} s")
    if report.growth_mb > MOST_GROWTH:
        print(f"broken: the server grew by {report.growth_mb:.0f} MB")
    if report.num_lost_otherwise:
        print(f"broken: {report.num_lost_otherwise} engines were lost that were not killed")
    return 1 if slow or report.growth_mb > MOST_GROWTH or report.num_lost_otherwise else 0


if __name__ == "__main__":
    sys.exit(main())
