"""`python -m pippin`, the same as the `pippin` command."""

from __future__ import annotations

from pippin.cli import main

if __name__ == "__main__":
    main()
