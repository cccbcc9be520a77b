"""How many threads compute, and what NVIDIA's driver shows."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from pippin.backends import host, nvidia
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


class Driver:
    """libcuda.so.1 as far as it is asked; a call that is to fail returns its status."""

    def __init__(self, **fails: int) -> None:
        self._fails = fails

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> int:
            if name == "cuDeviceGetAttribute" and not self._fails.get(name):
                target, attribute, _ = arguments
                pointed = ctypes.cast(target, ctypes.POINTER(ctypes.c_int))  # type: ignore[arg-type]
                pointed.contents.value = {75: 9, 76: 1}[attribute]  # type: ignore[index]
            if name == "cuDeviceGetName" and not self._fails.get(name):
                arguments[0].value = b"NVIDIA H200"  # type: ignore[attr-defined]
            return self._fails.get(name, 0)

        call.__name__ = name
        return call


@pytest.fixture(autouse=True)
def linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")


def test_the_first_gpu_says_its_name_and_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert (nvidia.gpu_name(), nvidia.compute_capability()) == ("NVIDIA H200", (9, 1))
    monkeypatch.setattr(ctypes, "CDLL", lambda library: Driver(cuDeviceGetName=100))
    assert nvidia.gpu_name() is None


def test_without_a_gpu_a_driver_or_linux_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuInit", "cuDeviceGet", "cuDeviceGetAttribute"):
        monkeypatch.setattr(ctypes, "CDLL", lambda library, name=name: Driver(**{name: 100}))
        assert nvidia.compute_capability() is None

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert nvidia.compute_capability() is None
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert nvidia.compute_capability() is None


def test_this_machine_agrees_with_its_driver() -> None:
    if shutil.which("nvidia-smi") is None:
        assert nvidia.compute_capability() is None
        return
    asked = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    assert nvidia.compute_capability() == tuple(map(int, said[0].split(".")))
