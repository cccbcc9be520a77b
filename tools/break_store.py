"""Breaks disk stores in every way that the tests know, more often than they do.

    python tools/break_store.py [--kills 1000] [--flips 1000] [--runs 8]

Stops at the first wrong byte, missing entry or damage that is not counted once. The ways are in
tests/cache/disk.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / "tests" / "cache" / "disk")]

from kill_writers import main as kill_writers  # noqa: E402
from test_crashes import enumerate_crashes  # noqa: E402
from test_damage import flip_bits, make_sound  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="of a process that writes")
    parser.add_argument("--flips", type=int, default=1000, help="of single bits, in any file")
    parser.add_argument("--runs", type=int, default=8, help="whose every change is a last one")
    asked = parser.parse_args()
    if asked.kills:
        kill_writers(asked.kills)
    with tempfile.TemporaryDirectory() as folder:
        if asked.flips:
            flip_bits(make_sound(Path(folder, "sound")), Path(folder), asked.flips)
            print(f"{asked.flips} flipped bits, 0 wrong, each counted once", flush=True)
        points = 0
        for seed in range(asked.runs):
            points += enumerate_crashes(Path(folder), seed, num_operations=120)
        print(f"{points} crash points of {asked.runs} runs, 0 wrong")


if __name__ == "__main__":
    main()
