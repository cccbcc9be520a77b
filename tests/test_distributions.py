"""The two distributions as newcomers meet them: built, installed where nothing is, served.

Dependencies are those of the environment that runs the tests, so that nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from processes import PATIENCE_SECONDS, is_installed

ROOT = Path(__file__).parent.parent
NEEDED = ("build", "hatchling", "hatch_fancy_pypi_readme", "readme_renderer", "pip")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout: git lists the files"),
    *(
        pytest.mark.skipif(not is_installed(name), reason=f"{name} is not installed")
        for name in NEEDED
    ),
]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`make dist`, which checks what it has built."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "dist.py"), str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Installation:
    """A virtual environment that sees our dependencies, and of Pippin only what is installed."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        self._folder, self._wheels = folder, wheels
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        dependencies = folder / "dependencies"
        dependencies.mkdir()
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if "pippin" not in path.name.lower():
                (dependencies / path.name).symlink_to(path)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "dependencies.pth").write_text(str(dependencies))

    @property
    def _environment(self) -> dict[str, str]:
        """Without what would lead to the checkout."""
        ours = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIPPIN"))}
        return {**ours, "PIP_NO_COMPILE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def install(self, requirement: str) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(self._folder / "bin" / "python")]
        options = ["--isolated", "--no-index", "--find-links", str(self._wheels)]
        done = subprocess.run(
            [*pip, "install", *options, requirement],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self._folder / "bin" / "pippin", *argv],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )

    @contextmanager
    def serve(self) -> Iterator[str]:
        """The address of `pippin serve` without a model's name."""
        process = subprocess.Popen(
            [self._folder / "bin" / "pippin", "serve", "--port", "0"],
            cwd=self._folder,
            env={**self._environment, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            assert process.stdout is not None
            said = ""
            while (found := re.search(r"at (http://\S+)", said)) is None:
                line = process.stdout.readline()
                assert line, said
                said += line
            yield found[1]
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def installation(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    folder = tmp_path_factory.mktemp("newcomer")
    installed = Installation(folder, dist)
    installed.install("pippin")
    yield installed
    shutil.rmtree(folder)


def test_a_wheel_without_the_demo_says_what_to_install_or_name(installation: Installation) -> None:
    assert "Check whether" in installation.run("doctor", "--help").stdout
    done = installation.run("serve", "--port", "0")
    assert done.returncode == 1
    assert done.stderr.startswith(
        'pippin: the demo model stories-hybrid-20m is not installed: pip install "pippin[demo]"'
    )
    assert len(done.stderr.splitlines()) == 1


def test_the_two_wheels_serve_and_answer(installation: Installation) -> None:
    installation.install("pippin[demo]")
    with installation.serve() as url:
        answer = httpx.post(
            f"{url}/v1/completions",
            json={"model": "stories-hybrid-20m", "prompt": "Once upon a time", "max_tokens": 8},
            timeout=PATIENCE_SECONDS,
        ).json()
        script = re.search(r'src="(page/app[^"]+)"', httpx.get(url).text)
        assert script, "no page at /"
        assert httpx.get(f"{url}/{script[1]}").status_code == 200
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["text"].strip()
