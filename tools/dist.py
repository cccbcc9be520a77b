"""Build pippin (sdist and wheel) and pippin-demo (wheel), and check them: `make dist`.

    python tools/dist.py [--release TAG] [FOLDER]          default: dist

What is wrong with one is an error: too large, a file that git ignores or one left out, a
long description that does not render or links into nowhere, metadata that is missing; of a
release also a tag that is not the version, and addresses that are placeholders. Builds with
what is installed (pip install -e ".[dev]"), so without a network.
"""

import argparse
import email.message
import email.parser
import io
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import readme_renderer.markdown

ROOT = Path(__file__).resolve().parent.parent
MODELS = "src/pippin/models/"
PLACEHOLDER = "pippin.example"
LIMITS = {"pippin.whl": 1_500_000, "pippin.tar.gz": 6_000_000, "pippin_demo.whl": 45_000_000}
MODEL_FILES = {
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "model.safetensors", "MODEL_CARD.md"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--release", metavar="TAG", help="check that TAG may be published")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    given = parser.parse_args()
    if given.release is not None:
        check_release(given.release)
    out = given.folder.resolve()
    for old in [*out.glob("pippin*.whl"), *out.glob("pippin-*.tar.gz")]:
        old.unlink()
    build(ROOT, out)
    build(ROOT / "demo", out, "--wheel")
    wheel, sdist, demo = (
        only(out, pattern)
        for pattern in ("pippin-*.whl", "pippin-*.tar.gz", "pippin_demo-*.whl")
    )
    check_size(wheel, "pippin.whl")
    check_size(sdist, "pippin.tar.gz")
    check_size(demo, "pippin_demo.whl")
    check_wheel(wheel)
    check_sdist(sdist)
    check_demo(demo)
    for path in (wheel, demo):
        check_metadata(path)
    if names_placeholder():
        print(f"Not for a release yet: pyproject.toml names {PLACEHOLDER} as the project's address.")


def check_release(tag: str) -> None:
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/pippin/version.py").read_text())
    if version is None or tag != f"v{version[1]}":
        sys.exit(f"the tag is {tag} and the version {version and version[1]}: they must agree")
    if names_placeholder():
        sys.exit(f"pyproject.toml names {PLACEHOLDER} as the project's address: set the real one")


def names_placeholder() -> bool:
    return f"https://{PLACEHOLDER}" in (ROOT / "pyproject.toml").read_text()


def build(project: Path, out: Path, *options: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *options]
    done = subprocess.run([*command, str(project)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"building {project.name} failed:\n{done.stdout}{done.stderr}")


def only(out: Path, pattern: str) -> Path:
    (path,) = out.glob(pattern)
    return path


def check_size(path: Path, kind: str) -> None:
    size = path.stat().st_size
    require(size <= LIMITS[kind], path, f"{size:,} bytes, more than {LIMITS[kind]:,}")
    print(f"{path.name}: {size:,} bytes")


def tracked(*folders: str) -> set[str]:
    """What git knows, or would take, without the model."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    names = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    return {name for name in names if not name.startswith(MODELS) and (ROOT / name).exists()}


def check_wheel(path: Path) -> None:
    expected = {name.removeprefix("src/") for name in tracked("src")}
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
    check_names(path, {name for name in names if ".dist-info/" not in name}, expected)


def check_sdist(path: Path) -> None:
    with tarfile.open(path) as sdist:
        names = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    files = tracked("src", "tests", "tools", "docs", "deploy", ".ci", ".github", ".gitignore", "Makefile", "LICENSE", "*.md", "pyproject.toml")
    files = {name for name in files if not name.startswith("demo/")}
    check_names(path, names - {"PKG-INFO"}, files)


def check_demo(path: Path) -> None:
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
    expected = {f"pippin_demo/stories-hybrid-20m/{name}" for name in MODEL_FILES}
    found = {name for name in names if ".dist-info/" not in name}
    check_names(path, found, {"pippin_demo/__init__.py", *expected})


def check_names(path: Path, found: set[str], expected: set[str]) -> None:
    require(not found - expected, path, f"stray files {sorted(found - expected)[:5]}")
    require(not expected - found, path, f"left out {sorted(expected - found)[:5]}")


def check_metadata(path: Path) -> None:
    metadata = read_metadata(path)
    for name in ("Name", "Version", "Summary", "Requires-Python", "License-Expression", "Project-URL", "Keywords"):
        require(metadata[name], path, f"no {name}")
    text = metadata.get_payload()
    warnings = io.StringIO()
    rendered = readme_renderer.markdown.render(text, stream=warnings)
    require(rendered, path, f"the long description does not render: {warnings.getvalue()}")
    # GitHub's flavour is what PyPI renders; <img> and <a> are what readers click on.
    links = re.findall(r'(?:href|src)="([^"]*)"', rendered)
    relative = [link for link in links if not re.match(r"https?://|#|mailto:", link)]
    require(not relative, path, f"links into nowhere: {relative[:5]}")


def read_metadata(path: Path) -> email.message.Message:
    with zipfile.ZipFile(path) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        return email.parser.Parser().parsestr(wheel.read(name).decode())


def require(fine: object, path: Path, message: str) -> None:
    if not fine:
        sys.exit(f"{path.name}: {message}")


if __name__ == "__main__":
    main()
