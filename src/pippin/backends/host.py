"""The machine that a process runs on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
CPU_INFO = Path("/proc/cpuinfo")
CPU_NAMES = ("model name", "CPU implementer", "CPU part")  # the first: not on Arm
THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # that the user may have set


def host_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Physical memory, or the container's limit if that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = cgroup.read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def cpu_name() -> str:
    """As the system calls it: machines with another one take other times."""
    if platform.system() == "Darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    try:
        first = CPU_INFO.read_text().split("\n\n")[0].splitlines()
    except OSError:  # containers may hide it
        first = []
    facts = [line.partition(":")[2].strip() for line in first if line.startswith(CPU_NAMES)]
    return " ".join([platform.machine(), *facts])


def num_threads() -> int:
    """Threads that compute at full speed here: one for each physical core that this process may run
    on, no more than the container's quota pays for, nor than the environment allows."""
    counts = [physical_cores(), *_environment_limits()]
    quota = cpu_quota()
    if quota is not None:
        counts.append(int(quota))  # half a CPU more would stop all threads at times
    return max(min(counts), 1)


def _environment_limits() -> Iterator[int]:
    for name in THREAD_LIMITS:
        value = os.environ.get(name, "")
        if value.isdigit() and int(value):
            yield int(value)


def cpu_quota(own: Path = OWN_CGROUP, cgroups: Path = CGROUPS) -> float | None:
    """CPUs' worth of time that this process's control groups, of either version, grant; None where
    they set no limit."""
    quotas = [quota for group in _cgroups(own, cgroups) if (quota := _quota_of(group)) is not None]
    return min(quotas, default=None)


def _cgroups(own: Path, cgroups: Path) -> Iterator[Path]:
    """The groups that this process is in, and those around them. In a container they may be named
    as its host sees them: then only the outermost is found."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root = cgroups
        elif "cpu" in controllers.split(","):
            root = cgroups / "cpu"
        else:
            continue
        inner = root / path.lstrip("/")
        yield from (inner, *(above for above in inner.parents if above.is_relative_to(root)))


def _quota_of(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = ((group / name).read_text().strip() for name in names)
    except OSError:  # not a group's directory, or none of ours to read
        return None
    return int(quota) / int(period) if quota.isdigit() else None


def physical_cores() -> int:
    """Physical cores among the CPUs this process may use; hyper-threads count once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len({_core_id(cpu) for cpu in os.sched_getaffinity(0)})


def _core_id(cpu: int) -> tuple[str, ...]:
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return tuple((topology / f).read_text() for f in ("physical_package_id", "core_id"))
    except OSError:  # containers may hide it: then each CPU counts
        return (str(cpu),)
