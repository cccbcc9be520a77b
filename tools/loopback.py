"""Programs of other people run in a network of their own, which has nothing but loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

ISOLATED = "PIPPIN_ISOLATED"  # set in the process that has a network namespace


def isolate() -> str:
    """Starts this program again in a network of loopback only; says why not, where it cannot."""
    if ISOLATED in os.environ:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return "isolated: loopback only"
    command = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        return "not isolated: `unshare --net` is not permitted"
    os.environ[ISOLATED] = "1"
    os.execvp("unshare", [*command, sys.executable, *sys.argv])
