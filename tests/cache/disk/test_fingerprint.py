"""Another model has another fingerprint; the same one is known again, also where it was moved."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pippin.cache.disk import fingerprint
from pippin.cache.disk.fingerprint import model_fingerprint


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return tmp_path / "user" / "pippin" / "weights.json"


def make_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"rope_theta": 10000}')
    (folder / "model-1.safetensors").write_bytes(b"a" * 5_000_000)
    (folder / "model-2.safetensors").write_bytes(b"b" * 1000)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_copy_is_the_same_model(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "copy" / "tokenizer.json").write_text("another")
    facts = {"dtype": "float32"}
    assert model_fingerprint(model, facts) == model_fingerprint(tmp_path / "copy", facts)


def test_any_byte_and_any_fact_counts(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    found = [model_fingerprint(model, {"dtype": "float32"})]
    found.append(model_fingerprint(model, {"dtype": "float16"}))
    found.append(model_fingerprint(model, {"dtype": "float32", "bits": "4"}))
    weights = model / "model-1.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[3_123_456] ^= 1
    weights.write_bytes(changed)
    os.utime(weights, ns=(1, 1))
    found.append(model_fingerprint(model, {"dtype": "float32"}))
    (model / "config.json").write_text('{"rope_theta": 50000}')
    found.append(model_fingerprint(model, {"dtype": "float32"}))
    (model / "model-1.safetensors").rename(model / "model-3.safetensors")
    found.append(model_fingerprint(model, {"dtype": "float32"}))
    (model / "zz_patch.safetensors").write_bytes(b"c" * 1000)  # torch loads it, mlx-lm does not
    found.append(model_fingerprint(model, {"dtype": "float32"}))
    assert len(set(found)) == len(found)


def test_weights_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "model")
    first = model_fingerprint(model, {})

    def never(path: Path) -> bytes:
        raise AssertionError(f"{path} is hashed again")

    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "hash_file", never)
        assert model_fingerprint(model, {}) == first
        os.utime(model / "config.json", ns=(1, 1))
        with pytest.raises(AssertionError, match=r"config\.json is hashed again"):
            model_fingerprint(model, {})
    assert model_fingerprint(model, {}) == first


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 3}', '{"a": "xy"}'])
def test_a_damaged_note_costs_a_hash(
    tmp_path: Path, own_cache: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(tmp_path / "model")
    first = model_fingerprint(model, {})
    own_cache.write_text(content)
    assert model_fingerprint(model, {}) == first
    assert "not what was written" in caplog.text


def replace_in_place(weights: Path, content: bytes) -> None:
    """As `cp -p` and `rsync -t --inplace` do: the inode and the time of modification stay."""
    before = weights.stat()
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = weights.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (
        before.st_size,
        before.st_mtime_ns,
        before.st_ino,
    )


@pytest.mark.parametrize("field", ["st_ctime_ns", "sample"])
def test_a_changed_file_is_noticed_by_its_ctime_and_by_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """Each is enough: one byte between samples, or a file system that keeps no ctime."""
    model = make_model(tmp_path / "model")
    weights = model / "model-1.safetensors"
    real = fingerprint.file_times
    if field == "sample":
        monkeypatch.setattr(fingerprint, "file_times", lambda facts: real(facts)[:1])
        content = b"c" * 5_000_000
    else:
        changed = bytearray(weights.read_bytes())
        changed[3_123_456] ^= 1
        content = bytes(changed)
    first = model_fingerprint(model, {})
    replace_in_place(weights, content)
    assert model_fingerprint(model, {}) != first


def test_a_file_that_is_written_while_it_is_hashed_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model")
    real = fingerprint.hash_file

    def hash_and_write(path: Path) -> bytes:
        hashed = real(path)
        if path.name == "model-2.safetensors":
            path.write_bytes(b"c" * 1000)
        return hashed

    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "hash_file", hash_and_write)
        first = model_fingerprint(model, {})
    assert model_fingerprint(model, {}) != first
