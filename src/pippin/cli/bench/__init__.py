"""The `pippin bench` commands: options in, a report out. Measures nothing itself."""

from __future__ import annotations

from cyclopts import App

from pippin.cli.bench.in_process import features, growth, one_batch, prefix, speculate
from pippin.cli.bench.served import churn, compare, restart, serve, streams

bench = App(name="bench", help="Measure speed. Each command can write --json and --markdown.")
for command in (
    *(one_batch, serve, streams, churn, growth),
    *(compare, prefix, restart, features, speculate),
):
    bench.command(command)
