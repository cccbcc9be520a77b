"""The documents say only what is true: paths exist, commands and options are real."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from itertools import pairwise
from pathlib import Path

from cyclopts import App

from cases import cases
from pippin import cli
from pippin.cli.options import EXPERT, GROUP_OF, HEADINGS
from pippin.config import Config
from test_tools import load_tool

ROOT = Path(__file__).parent.parent
MAX_BYTES = 20_000  # of a document; a changelog grows with the project
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.md")])
FENCED = re.MULTILINE | re.DOTALL
TARGETS = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)

over_documents = cases("document", DOCUMENTS, ids=lambda path: path.name)


def code_lines(document: Path) -> list[str]:
    """Lines of fenced blocks, with continuation lines joined, and inline code."""
    text = document.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()] + re.findall(
        r"`([^`\n]+)`", prose
    )


OPTIONS: dict[int, set[str]] = {}  # by command: to assemble those of one takes long


def options_of(command: App) -> set[str]:
    if command.default_command is None:  # a group of commands
        return {"--help", "--help-all"}
    if id(command) not in OPTIONS:
        arguments = command.assemble_argument_collection()
        OPTIONS[id(command)] = {name for argument in arguments for name in argument.names}
    return {"--help", "--help-all", *OPTIONS[id(command)]}


@over_documents
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    linked = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    named = [
        word
        for line in code_lines(document)
        for word in re.findall(r"(?<![\w./-])(?:src|tests|tools|docs|\.ci)/[\w./-]+", line)
    ]
    missing = [path for path in linked if not (document.parent / path).exists()]
    named += [line for line in code_lines(document) if re.fullmatch(r"[\w-]+(/[\w-]+)*/", line)]
    if document.name == "CHANGELOG.md":  # it names what there was
        named = []
    created = re.findall(r"^```python (\S+)$", text, re.MULTILINE)  # by a worked example
    missing += [path for path in named if path not in created and not (ROOT / path).exists()]
    assert not missing


def anchors(document: Path) -> set[str]:
    """Fragments of a document's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=FENCED)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@over_documents
def test_linked_headings_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", text)
    missing = [
        f"{path}#{fragment}"
        for path, fragment in links
        if fragment not in anchors(document.parent / path if path else document)
    ]
    assert not missing


def test_the_packages_links_lead_to_files_that_exist() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    files = [url.partition("/blob/main/")[2] for url in urls.values() if "/blob/main/" in url]
    assert len(files) >= 2
    assert [name for name in files if not (ROOT / name).is_file()] == []


@over_documents
def test_no_document_is_too_large_to_read(document: Path) -> None:
    assert document.name == "CHANGELOG.md" or document.stat().st_size <= MAX_BYTES


def test_every_document_can_be_reached_from_the_readme() -> None:
    reached = {ROOT / "README.md"}
    unread = [ROOT / "README.md"]
    while unread:
        document = unread.pop()
        text = document.read_text(encoding="utf-8")
        for link in re.findall(r"\]\((?!https?:)([^)#\s]+\.md)", text):
            if (linked := (document.parent / link).resolve()) not in reached:
                reached.add(linked)
                unread.append(linked)
    assert {path for path in DOCUMENTS if path.parent.name != "stories-hybrid-20m"} <= reached


@over_documents
def test_source_files_that_are_named_exist(document: Path) -> None:
    """Also those that a document names without their folder."""
    folders = ("src", "tests", "tools", ".ci", "demo")
    files = {path.name for folder in folders for path in (ROOT / folder).rglob("*.*")}
    prose = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=FENCED)
    named = re.findall(r"`[\w./-]*?([\w.-]+\.(?:py|js|cpp|h))`", prose)
    assert document.name == "CHANGELOG.md" or [name for name in named if name not in files] == []


@over_documents
def test_words_are_those_of_the_field(document: Path) -> None:
    """A request is preempted, a client disconnects, an entry is evicted, a value is returned."""
    vague = r"\b(whoever|(no|some|any|every)body|told|tells|mended|begun|anew|museum)\b"
    vague += r"|\b(is over|goes first|hands? over|handed over|takes? in\b|took in|let in)\b"
    text = document.read_text(encoding="utf-8")
    found = re.findall(vague, text, re.IGNORECASE)
    assert document.name == "CHANGELOG.md" or [match[0] or match[2] for match in found] == []


@over_documents
def test_make_targets_exist(document: Path) -> None:
    named = [
        target
        for line in code_lines(document)
        for target in re.findall(r"^\s*(?:\$ )?make ([a-z][\w-]*)", line)
    ]
    assert set(named) <= set(TARGETS)


@over_documents
def test_commands_and_their_options_exist(document: Path) -> None:
    for line in code_lines(document) if document.name != "CHANGELOG.md" else ():
        if (called := re.match(r"(?:\$ )?(?:\S*/)?pippin ([a-z][^`#|&>]*)", line.strip())) is None:
            continue
        command, *words = called[1].split()
        assert command in cli.app, f"{document.name}: {line}"
        app = cli.app[command]
        while words and words[0][0] != "-" and words[0] in app:
            app = app[words.pop(0)]
        own, _, for_serve = f" {' '.join(words)}".partition(
            " -- "
        )  # as `pippin service install` has it
        unknown = named_options(own) - options_of(app)
        unknown |= named_options(for_serve) - options_of(cli.app["serve"])
        assert not unknown, f"{document.name}: {line}"


def named_options(words: str) -> set[str]:
    return {word.partition("=")[0] for word in words.split() if word[:2] == "--"}


def chapters(document: Path) -> dict[str, str]:
    """The text under each second-level heading, by the heading."""
    parts = re.split(r"^## (.*)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_tables_of_request_fields_are_those_of_the_code() -> None:
    """`tools/field_tables.py` writes them; their last column is written by hand."""
    tool = load_tool("field_tables")
    texts = [document.read_text(encoding="utf-8") for document in DOCUMENTS]
    assert [tool.rewritten(text) for text in texts] == texts
    found = [name for text in texts for _, name, _ in tool.MARKED.findall(text)]
    assert set(found) == tool.TABLES.keys()


def test_every_option_of_serve_is_documented() -> None:
    options = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(section.default_factory):  # type: ignore[arg-type]
            is_positional = field.name == "model"
            name = "MODEL" if is_positional else f"--{field.name.replace('_', '-')}"
            assert f"`{name}`" in options
            if field.default not in (None, True, False, "auto", ()):
                assert re.search(rf"`{name}` \| `?{field.default}`? \|", options), name


def test_options_are_documented_under_the_headings_of_the_help() -> None:
    """With a star where `--help` leaves an option out."""
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| ([\w ]+) \| default \| \|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert [name.lower() for name, _ in tables] == [name.lower() for name in HEADINGS]
    for name, rows in tables:
        for star, option in re.findall(r"^\| (\* )?`--([\w-]+)`", rows, re.MULTILINE):
            field = option.replace("-", "_")
            if field != "served_model_name":  # a spelling of vLLM's, not a field
                assert GROUP_OF[field].name.lower() == name.lower(), option
                assert bool(star) == (field in EXPERT), option


def paths_in_the_tree() -> list[Path]:
    """The folders and files that the document's tree names, by indentation."""
    tree = chapters(ROOT / "docs" / "internals" / "source-tree.md")["What is where"]
    paths: list[Path] = []
    parents = [ROOT]
    for indent, names in re.findall(r"^( *)((?:[\w./-]+(?:/|\.py) )+) *\S.*$", tree, re.MULTILINE):
        del parents[len(indent) // 2 + 1 :]
        paths += [parents[-1] / name for name in names.split()]
        if names.endswith("/ "):
            parents.append(paths[-1])
    return paths


def test_the_tree_names_each_folder_of_the_package_and_no_other() -> None:
    package = ROOT / "src" / "pippin"
    names = (str(path.parent) for path in package.rglob("*") if path.is_file())
    actual = {package, *(Path(name) for name in names if "__pycache__" not in name)}
    actual |= {folder for path in actual for folder in path.parents if package in folder.parents}
    assert [path for path in paths_in_the_tree() if not path.exists()] == []
    named = [path for path in paths_in_the_tree() if path.suffix != ".py"]
    assert {folder for folder in named if package in (folder, *folder.parents)} == actual
    assert len(set(named)) == len(named)


def test_the_glossary_is_short_and_each_term_has_a_drawing_and_is_used() -> None:
    terms = chapters(ROOT / "docs" / "glossary.md")
    assert len(terms) <= 15
    assert [term for term, text in terms.items() if text.count("```") != 2] == []
    others = "".join(
        path.read_text(encoding="utf-8") for path in DOCUMENTS if path.name != "glossary.md"
    )
    linked = set(re.findall(r"glossary\.md#([\w-]+)", others))
    assert {re.sub(r" ", "-", term.lower()) for term in terms} == linked


def test_the_files_on_a_requests_path_import_each_other_in_that_order() -> None:
    """The messages between the two processes are what both sides import."""
    path = chapters(ROOT / "docs" / "how-it-works.md")["The path of one request"]
    files = [ROOT / name for name in re.findall(r"^\d+\. `([\w/]+\.py)`", path, re.MULTILINE)]
    assert 8 <= len(files) <= 10
    wire = ROOT / "src" / "pippin" / "messages.py"
    assert files.count(wire) == 1
    for importer, imported in pairwise(files):
        if importer == wire:
            importer, imported = imported, importer
        assert imported in imported_files(importer), f"{importer} does not import {imported}"


def imported_files(path: Path) -> set[Path]:
    """Files of ours that a file imports, by themselves or through their package."""
    found: set[Path] = set()
    for module in re.findall(r"^ *from (pippin[\w.]*) import", path.read_text(), re.MULTILINE):
        target = ROOT.joinpath("src", *module.split("."))
        if (target / "__init__.py").exists():
            found |= {target / "__init__.py"} | imported_files(target / "__init__.py")
        else:
            found.add(target.with_suffix(".py"))
    return found
