"""Runs the sections and prints the report. Knows nothing that they look at."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from time import monotonic

from pippin.config import Config
from pippin.errors import ConfigError, PippinError
from pippin.terminal.doctor.findings import ISSUE, SAFE, Examined, Finding, Section, TimeLimit
from pippin.terminal.doctor.report import as_document, as_page, is_right
from pippin.terminal.doctor.sections import sections

LIMIT_SECONDS = 60.0  # of the demo model; after it no further times are measured


def run_doctor(config: Config, *, as_json: bool, saves: bool = False) -> int:
    """Print the report; the exit status, 1 if something is wrong. Progress is on stderr."""
    limit = TimeLimit(LIMIT_SECONDS)
    examined = [_examine(section) for section in sections(config, limit, saves=saves)]
    if as_json:
        print(json.dumps(as_document(examined, limit.passed()), indent=2))
    else:
        print(as_page(examined, limit.passed()))
    return 0 if is_right(examined) else 1


def _examine(section: Section) -> Examined:
    print(f"pippin doctor: {section.doing} ...", file=sys.stderr, flush=True)
    started = monotonic()
    findings = tuple(_findings(section))
    return Examined(section.name, round(monotonic() - started, 2), findings)


def _findings(section: Section) -> Iterator[Finding]:
    """A section that fails is a finding; the others still run."""
    try:
        yield from section.look()
    except ConfigError:  # of usage: status 2
        raise
    except PippinError as error:
        means = f"{section.doing} is not possible with these options"
        yield Finding(section.name, error.message, "wrong", means, "do as the message says")
    except Exception as error:
        traceback.print_exc()
        means = f"{section.doing} failed, and `pippin serve` may fail there too"
        remedy = f"{SAFE}, with the traceback above" if section.name != "machine" else ISSUE
        yield Finding(section.name, f"{type(error).__name__}: {error}", "wrong", means, remedy)
