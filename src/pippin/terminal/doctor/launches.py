"""What launching work on a device takes. Knows no library: work is a function that waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

from pippin.terminal.doctor.findings import Finding, checked

ROUND_TRIPS = 50
CHAIN = 500  # operations, each of which needs the one before
PRODUCT_SIZE = 1024

Work = Callable[[], None]


def launch_findings(one: Work, chain: Work, product: Work) -> Iterator[Finding]:
    """`one`: the smallest operation; `chain`: CHAIN of them; `product`: of two square matrices."""
    for work in (one, chain, product):
        work()  # kernels are built, memory is there
    trip = sorted(_seconds(one) for _ in range(ROUND_TRIPS))[ROUND_TRIPS // 2]
    yield Finding(
        "round trip", f"{1e6 * trip:,.0f} µs for one empty operation", numbers={"seconds": trip}
    )
    each = min(_seconds(chain) for _ in range(3)) / CHAIN
    yield Finding(
        "launches",
        f"{1 / each:,.0f} a second, {1e6 * each:.1f} µs each",
        numbers={"seconds": each, "per_second": 1 / each},
    )
    rate = 2 * PRODUCT_SIZE**3 / min(_seconds(product) for _ in range(3)) / 1e9
    yield Finding("float32 product", f"{rate:,.0f} GFLOP/s", numbers={"gflops": rate})


def product_finding(error: float) -> Finding:
    """`error`: the largest, against numpy."""
    return checked(
        "product = numpy's",
        f"error {error:.0e}",
        ok=error < 0.5,
        means="a plain matrix product of the library is wrong: no result can be trusted",
        remedy="install the library again; if that does not help, report it to mlx or torch",
        numbers={"error": error},
    )


def _seconds(work: Work) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started
