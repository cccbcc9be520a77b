"""How many threads compute: what affinity, a container's quota and the environment allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from pippin.backends import host
from pippin.backends.host import cpu_name, cpu_quota, host_memory_bytes, num_threads


def write(root: Path, **files: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text + "\n")


@pytest.mark.parametrize(("limit", "expected"), [("1048576\n", 1 << 20), ("max\n", None)])
def test_a_container_s_limit_bounds_the_memory(
    tmp_path: Path, limit: str, expected: int | None
) -> None:
    path = tmp_path / "memory.max"
    path.write_text(limit)
    unlimited = host_memory_bytes(path.with_name("absent"))
    assert host_memory_bytes(path) == (expected or unlimited)


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000", None), ("150000 100000", 1.5), ("50000 100000", 0.5)]
)
def test_a_quota_of_the_second_version(tmp_path: Path, text: str, quota: float | None) -> None:
    write(tmp_path, cgroup="0::/")
    write(tmp_path / "fs", cpu__max=text)
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "fs") == quota


def test_the_least_quota_of_all_groups_around_counts(tmp_path: Path) -> None:
    write(tmp_path, cgroup="0::/pod/server/inner")
    write(tmp_path / "fs" / "pod", cpu__max="300000 100000")
    write(tmp_path / "fs" / "pod" / "server", cpu__max="700000 100000")
    write(tmp_path / "fs" / "pod" / "server" / "inner", cpu__max="max 100000")
    write(tmp_path / "fs" / "other", cpu__max="100000 100000")
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "fs") == 3.0


@pytest.mark.parametrize(("microseconds", "quota"), [("-1", None), ("400000", 4.0)])
def test_a_quota_of_the_first_version(
    tmp_path: Path, microseconds: str, quota: float | None
) -> None:
    write(tmp_path, cgroup="9:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n1:name=systemd:/x")
    group = tmp_path / "fs" / "cpu"  # a container sees its own group at the root
    write(group, cpu__cfs_quota_us=microseconds, cpu__cfs_period_us="100000")
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "fs") == quota


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ("processor : 0\nmodel name\t: A 9\n\nmodel name : B", "m A 9"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd0c", "m 0x41 0xd0c"),
    ],
)
def test_a_cpu_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: str, found: str
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "m")
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr(host, "CPU_INFO", tmp_path / "cpuinfo")
    assert cpu_name() == "m"
    (tmp_path / "cpuinfo").write_text(facts)
    assert cpu_name() == found


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "absent", tmp_path) is None


@pytest.mark.parametrize(
    ("cores", "quota", "environment", "threads"),
    [
        (8, None, {}, 8),
        (8, 3.7, {}, 3),
        (8, 0.5, {}, 1),
        (2, 16.0, {}, 2),
        (8, None, {"OMP_NUM_THREADS": "4"}, 4),
        (8, 2.0, {"OPENBLAS_NUM_THREADS": "4"}, 2),
        (8, None, {"OPENBLAS_NUM_THREADS": "0", "OMP_NUM_THREADS": "2,1"}, 8),
    ],
)
def test_threads_are_the_least_that_anything_allows(
    cores: int,
    quota: float | None,
    environment: dict[str, str],
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in host.THREAD_LIMITS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(host, "physical_cores", lambda: cores)
    monkeypatch.setattr(host, "cpu_quota", lambda: quota)
    assert num_threads() == threads
