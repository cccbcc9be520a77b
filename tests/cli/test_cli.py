"""The command line: generated from the config, quick to start, and clear about mistakes."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from typing import get_type_hints

import pytest

import pippin
import pippin.config
from cli.commands import error_of, output_of, served_with
from pippin import cli
from pippin.amounts import parse_memory
from pippin.config import Config, EngineConfig, ModelConfig, ServerConfig
from pippin.errors import LoadError
from processes import environment


def test_no_options_means_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served_with(monkeypatch) == Config()


def test_options_reach_their_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["some/model", "--max-running", "3", "--no-overlap", "--port", "0", "--memory", "6GB"]
    assert served_with(monkeypatch, *argv) == Config(
        model=ModelConfig(model="some/model"),
        engine=EngineConfig(max_running=3, overlap=False, memory="6GB"),
        server=ServerConfig(port=0),
    )


def test_the_environment_sets_defaults_and_options_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPPIN_BACKEND", "fake")
    monkeypatch.setenv("PIPPIN_PORT", "9000")
    config = served_with(monkeypatch, "--port", "9001")
    assert (config.model.backend, config.server.port) == ("fake", 9001)


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
    shown = " ".join(output_of(capsys, "serve", "--help").replace("│", " ").split())
    arguments = cli.app["serve"].assemble_argument_collection(parse_docstring=True)
    helps = {argument.name: str(argument.parameter.help) for argument in arguments}
    for section in get_type_hints(Config).values():
        for field in dataclasses.fields(section):
            name = "--" + field.name.replace("_", "-")
            assert ("MODEL" if name == "--model" else name) in shown
            assert helps[name].endswith(".")
            assert helps[name].split()[0] in shown


def test_every_check_of_a_value_is_an_error_that_the_command_line_tells() -> None:
    """cyclopts shows a traceback of any other."""
    assert "raise ValueError" not in inspect.getsource(pippin.config)


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
        (["serve", "--allowed-host", "a.*"], "* stands alone or as in *.example.com"),
        (["serve", "--cors-origin", "chat.example"], "is not like https://chat.example.com"),
        (["serve", "--header-timeout", "0"], "header_timeout must be more than 0 seconds, got 0"),
        (["serve", "--max-choices", "0"], "max_choices must be at least 1, got 0"),
        (["serve", "--memory", "lots"], 'memory must be like "6GB" or a fraction'),
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
    def fail(config: Config) -> None:
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


@pytest.mark.parametrize(
    "code", ["import pippin", "import pippin.startup.launch", "import pippin.cli"]
)
def test_starting_up_loads_no_model_library(code: str) -> None:
    probe = (
        f"{code}\nimport sys\nprint([m for m in ('mlx', 'mlx_lm', 'torch') if m in sys.modules])"
    )
    out = subprocess.check_output([sys.executable, "-c", probe], env=environment(), text=True)
    assert out.strip() == "[]"


def test_the_version_is_the_packages_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == pippin.__version__


def test_an_unknown_name_in_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        pippin.Nothing  # noqa: B018


def test_an_option_that_would_do_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="canary checks the prefix cache"):
        EngineConfig(canary="log", prefix_cache=False)
