"""What the driver shows, and what it does not."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest

from pippin.backends import nvidia


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


def test_the_first_gpu_says_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert nvidia.compute_capability() == (9, 1)


def test_the_first_gpu_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert nvidia.gpu_name() == "NVIDIA H200"
    monkeypatch.setattr(ctypes, "CDLL", lambda library: Driver(cuDeviceGetName=100))
    assert nvidia.gpu_name() is None


@pytest.mark.parametrize("name", ["cuInit", "cuDeviceGet", "cuDeviceGetAttribute"])
def test_a_driver_without_a_gpu_is_no_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda library: Driver(**{name: 100}))
    assert nvidia.compute_capability() is None


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert nvidia.compute_capability() is None


def test_a_mac_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
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
