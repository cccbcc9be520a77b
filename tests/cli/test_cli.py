"""The command line: generated from the config, quick to start, and clear about mistakes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest
from cyclopts import App
from rich.console import Console

import pippin
import pippin.config
from cases import cases
from cli.commands import error_of, output_of, served_with
from pippin import cli
from pippin.amounts import parse_memory
from pippin.cli.options import GROUP_OF, HEADINGS
from pippin.config import Config, EngineConfig, LimitsConfig, ModelConfig, ServerConfig
from pippin.errors import LoadError
from processes import run_python

# Words that readers of another mother tongue stumble over, where the field has its own.
DIALECT = re.compile(
    r"\b(whoever|nobody|somebody|told|tells|mended|goes|comes|come|begun|begin|takes in|hands|"
    r"lets in|holds|sign of life|passed over|looked for)\b",
    re.IGNORECASE,
)


def test_options_are_read_where_pydantic_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """cyclopts then has pydantic check what it made of them."""
    import pydantic  # noqa: F401

    config = served_with(monkeypatch, "--max-choices", "7")
    assert config == Config(limits=LimitsConfig(max_choices=7))


def test_options_reach_their_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["some/model", "--max-running", "3", "--no-overlap", "--port", "0", "--memory", "6GB"]
    assert served_with(monkeypatch, *argv) == Config(
        model=ModelConfig(model="some/model"),
        engine=EngineConfig(max_running=3, overlap=False, memory="6GB"),
        server=ServerConfig(port=0),
    )


def test_keys_hosts_and_origins_may_be_several(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["--api-key", "a", "--api-key", "b", "--allowed-host", "*.x.y", "--cors-origin", "*"]
    assert served_with(monkeypatch, *argv).server == ServerConfig(
        api_key=("a", "b"), allowed_host=("*.x.y",), cors_origin=("*",)
    )
    monkeypatch.setenv("PIPPIN_API_KEY", "c d")
    assert served_with(monkeypatch).server.api_key == ("c", "d")


@pytest.mark.parametrize("variable", ["PIPPIN_API_KEY", "PIPPIN_PORT", "PIPPIN_SERVED_NAME"])
def test_an_empty_variable_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str
) -> None:
    monkeypatch.setenv(variable, "")
    status, text = error_of(capsys, "serve")
    assert status != 0
    assert variable in text


def test_every_config_field_is_an_option_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    shown = unwrapped(output_of(capsys, "serve", "--help-all"))
    arguments = cli.app["serve"].assemble_argument_collection(parse_docstring=True)
    helps = {argument.name: str(argument.parameter.help) for argument in arguments}
    for section in get_type_hints(Config).values():
        for field in dataclasses.fields(section):
            name = "--" + field.name.replace("_", "-")
            assert ("MODEL" if name == "--model" else name) in shown
            assert helps[name].endswith(".")
            assert helps[name].split()[0] in shown
            assert field.name in GROUP_OF


def unwrapped(page: str) -> str:
    return " ".join(page.replace("│", " ").split())


def commands(app: App, name: str) -> Iterator[tuple[str, App]]:
    for word in app:
        if not word.startswith("-"):
            yield f"{name} {word}", app[word]
            yield from commands(app[word], f"{name} {word}")


@cases(("name", "command"), list(commands(cli.app, "pippin")))
def test_help_is_made_of_whole_sentences_in_plain_words(name: str, command: App) -> None:
    texts = [command.help.partition("\n")[0]]
    if command.default_command is not None:
        arguments = command.assemble_argument_collection(parse_docstring=True)
        texts += [str(argument.parameter.help) for argument in arguments if argument.show]
    for text in texts:
        assert re.match(r"[A-Z`]", text), f"{name}: {text}"
        assert text.rstrip().endswith((".", ").")), f"{name}: {text}"
        assert not DIALECT.search(text), f"{name}: {text}"


def test_help_shows_the_text_of_each_option_as_it_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Help is Markdown: stars outside of backticks disappear, line breaks inside of them stay."""
    monkeypatch.setattr(cli.app, "console", Console(width=2000))
    page = output_of(capsys, "serve", "--help-all")
    for argument in cli.app["serve"].assemble_argument_collection(parse_docstring=True):
        written = " ".join(str(argument.parameter.help).replace("`", "").split())
        assert not argument.show or written in page, argument.name


def test_expert_options_are_listed_by_help_all_alone(capsys: pytest.CaptureFixture[str]) -> None:
    short = output_of(capsys, "serve", "--help")
    assert "--port" in short
    assert "--max-gap" not in short
    assert "--help-all lists 5 more." in unwrapped(short)
    full = output_of(capsys, "serve", "--help-all")
    assert "--max-gap" in full
    assert "--help-all lists" not in full
    assert output_of(capsys, "serve", "--help") == short  # of one page, not from now on


@pytest.mark.parametrize("command", ["serve", "chat", "doctor", "config"])
def test_options_are_listed_under_headings(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = output_of(capsys, *command.split(), "--help")
    headings = re.findall(r"╭─ (.*?) ─", page)
    expected = [name for name in HEADINGS if name in headings]
    assert expected[:4] == ["Model", "Memory", "Prefix cache", "Batching"]
    assert [name for name in headings if name in HEADINGS] == expected  # in this order


def test_an_own_option_of_a_command_is_shown_though_a_field_of_its_name_is_expert(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pippin.cli.options.EXPERT", {"max_tokens", "overlap"})
    page = output_of(capsys, "chat", "--help")
    assert "--max-tokens" in page
    assert "--overlap" not in page


@pytest.mark.parametrize(
    ("argv", "section", "expected"),
    [
        (["--max-model-len", "4096"], "model", ModelConfig("some/model", max_len=4096)),
        (["--tool-call-parser", "openai"], "server", ServerConfig(tool_parser="openai")),
        (
            ["--enable-auto-tool-choice", "--tool-call-parser=hermes"],
            "server",
            ServerConfig(tool_parser="hermes"),
        ),
        (["--served-model-name", "a"], "server", ServerConfig(served_name="a")),
        (
            ["--served-model-name", "a", "b", "c", "--port", "1"],
            "server",
            ServerConfig(served_name="a", alias=("b", "c"), port=1),
        ),
        (
            ["--alias", "x", "--served-model-name", "a", "b"],
            "server",
            ServerConfig(served_name="a", alias=("x", "b")),
        ),
    ],
)
def test_options_of_vllm_mean_here_what_they_mean_there(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], section: str, expected: object
) -> None:
    assert getattr(served_with(monkeypatch, "some/model", *argv), section) == expected


def test_one_name_in_two_spellings_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["serve", "--served-name", "a", "--served-model-name", "b"]
    status, text = error_of(capsys, *argv)
    assert status == 2
    assert "as --served-name and as --served-model-name: give one" in text


def test_an_unknown_tool_parser_is_refused_before_anything_is_downloaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pippin.startup.launch.resolve", lambda config: pytest.fail("resolved"))
    argv = ["serve", "no/model", "--port", "0", "--tool-call-parser", "unheard_of"]
    status, text = error_of(capsys, *argv)
    assert status == 2
    assert "tool_parser 'unheard_of' is unknown: use one of auto, off, harmony" in text
    assert "llama3_json" in text


def test_every_check_of_a_value_is_an_error_that_the_command_line_tells() -> None:
    """cyclopts shows a traceback of any other."""
    source = Path(pippin.config.__file__).read_text(encoding="utf-8")
    assert "class ServerConfig" in source
    assert "raise ValueError" not in source


def test_a_switch_can_be_turned_off_whatever_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPPIN_DETERMINISTIC", "true")
    assert served_with(monkeypatch).engine.deterministic
    assert not served_with(monkeypatch, "--no-deterministic").engine.deterministic


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--prot", "1"], "Did you mean --port?"),
        (["serve", "--max-runing=4"], "Did you mean --max-running?"),
        (["serv"], 'Did you mean "serve"?'),
        (["serve", "--port", "x"], "--port"),
        (["serve", "--backend", "cuda"], 'Choose from: "auto", "mlx", "torch", "fake"'),
        (["serve", "--max-running", "0"], "max_running must be at least 1, got 0"),
        (["serve", "--max-queue-tokens", "0"], "max_queue_tokens must be at least 1, got 0"),
        (["serve", "--engine-timeout", "0"], "engine_timeout must be at least 1, got 0"),
        (["serve", "--port", "70000"], "port must be between 0 and 65535, got 70000"),
        (["serve", "--api-key", ""], "api_key is empty"),
        (["serve", "--allowed-host", "a.*"], "allowed_host 'a.*' is not valid: use a name"),
        (["serve", "--cors-origin", "chat.example"], "such as https://chat.example.com"),
        (["serve", "--header-timeout", "0"], "header_timeout must be more than 0 seconds, got 0"),
        (["serve", "--max-choices", "0"], "max_choices must be at least 1, got 0"),
        (["serve", "--memory", "lots"], 'memory must be an amount such as "6GB" or a fraction'),
    ],
)
def test_a_mistake_is_named_with_status_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    status, text = error_of(capsys, *argv)
    assert status == 2
    assert message in text


def test_a_model_that_cannot_be_served_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: Config, models: list[Config]) -> None:
        raise LoadError("no such model")

    monkeypatch.setattr("pippin.startup.launch.run_server", fail)
    assert error_of(capsys, "serve") == (1, "pippin: no such model")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("6GB", 6_000_000_000), ("1.5gb", 1_500_000_000), ("4096", 4096), ("0.7", 0.7), ("1.0", 1.0)],
)
def test_memory_is_bytes_or_a_fraction(text: str, expected: float) -> None:
    assert parse_memory(text) == expected
    assert isinstance(parse_memory(text), type(expected))


def test_the_server_loads_no_model_library_and_nothing_of_the_engine() -> None:
    """Nor do the other commands, which import less."""
    code = (
        "import sys, pippin.cli, pippin.startup.launch\n"
        "unwanted = 'mlx', 'mlx_lm', 'torch', 'pippin.engine.run', 'pippin.scheduler.scheduler'\n"
        "print([name for name in unwanted if name in sys.modules])"
    )
    assert run_python(code) == "[]"


def test_the_version_is_the_packages_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == pippin.__version__


def test_an_unknown_name_in_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        pippin.Nothing  # noqa: B018


def test_an_option_that_would_do_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="canary requires the prefix cache"):
        EngineConfig(canary="log", prefix_cache=False)
