"""Options that are not on the command line: variables, pippin.toml, its table of several models."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from cli.commands import error_of, output_of, served_models, served_with
from pippin.config import Config, EngineConfig, LimitsConfig, ModelConfig, ServerConfig


@pytest.fixture(autouse=True)
def empty_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


def write(text: str, path: str = "pippin.toml", *, mode: int = 0o644) -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(mode)
    return file


def test_a_file_says_what_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        """
        model = "some/model"
        max-running = 3
        overlap = false            # as --no-overlap
        memory = "6GB"
        port = 0
        alias = ["gpt-4o", "with a space"]
        body_timeout = 5           # either spelling
        """
    )
    assert served_with(monkeypatch) == Config(
        ModelConfig(model="some/model"),
        EngineConfig(max_running=3, overlap=False, memory="6GB"),
        ServerConfig(port=0, alias=("gpt-4o", "with a space")),
        LimitsConfig(body_timeout=5.0),
    )


def test_a_file_may_spell_options_as_vllm_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write("max-model-len = 5\nserved_model_name = 'mine'\ntool-call-parser = 'openai'")
    config = served_with(monkeypatch)
    assert config.model.max_len == 5
    assert config.server == ServerConfig(served_name="mine", tool_parser="openai")
    assert 'served-name = "mine"  # pippin.toml:2' in output_of(capsys, "config")
    write("max-model-len = 5\nmax-len = 6")
    assert "max-len is already set at pippin.toml:1" in error_of(capsys, "serve")[1]


def test_option_before_environment_before_file_before_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write("port = 1\nmax-running = 1\nmax-queue = 1\nalias = ['file']")
    monkeypatch.setenv("PIPPIN_PORT", "2")
    monkeypatch.setenv("PIPPIN_MAX_RUNNING", "2")
    monkeypatch.setenv("PIPPIN_ALIAS", "environment")
    config = served_with(monkeypatch, "--port", "3", "--alias", "option")
    assert (config.server.port, config.engine.max_running, config.engine.max_queue) == (3, 2, 1)
    assert config.server.alias == ("option",)
    assert config.engine.max_queue_tokens == EngineConfig.max_queue_tokens


def test_a_misspelt_variable_is_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PIPPIN_MAX_RUNING", "PIPPIN_PORT_8000_TCP_ADDR", "PIPPIN_SERVICE_HOST"):
        monkeypatch.setenv(name, "8")
    monkeypatch.setenv("PIPPIN_MAX_QUEUE", "7")
    assert served_with(monkeypatch) == Config(engine=EngineConfig(max_queue=7))
    note = "pippin: PIPPIN_MAX_RUNING is not read; did you mean PIPPIN_MAX_RUNNING?\n"
    assert capsys.readouterr().err == note


def test_the_working_directory_goes_before_the_users_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write("port = 1", str(tmp_path / "home" / "pippin" / "pippin.toml"))
    assert served_with(monkeypatch).server.port == 1
    write("host = '::1'")
    assert served_with(monkeypatch).server == ServerConfig(host="::1")  # one file, not both


def test_a_named_file_goes_before_both(monkeypatch: pytest.MonkeyPatch) -> None:
    write("port = 1")
    write("port = 2", "other.toml")
    assert served_with(monkeypatch, "--config", "other.toml").server.port == 2
    monkeypatch.setenv("PIPPIN_CONFIG", "other.toml")
    assert served_with(monkeypatch).server.port == 2
    assert served_with(monkeypatch, "--config", "/dev/null") == Config()


def test_what_a_command_has_no_use_for_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write("port = 1\nmax-tokens = 7\nbackend = 'fake'")
    seen: list[object] = []
    monkeypatch.setattr("pippin.terminal.chat.client_of", lambda *given: given)
    monkeypatch.setattr(
        "pippin.terminal.chat.run_chat", lambda client, **own: seen.extend((client, own["options"]))
    )
    output_of(capsys, "chat", "--dtype", "float32")
    model = ModelConfig(backend="fake", dtype="float32")
    # chat's own --max-tokens is its own
    assert seen == [(model, ["--dtype=float32"], Path("pippin.toml")), {"max_tokens": 512}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "port = 1\n\nmax-runing = 3",
            "pippin.toml:3: max-runing is not an option of `pippin serve`",
        ),
        ("max-runing = 3", "did you mean max-running?"),
        ("zzz = 3", "`pippin serve --help-all` lists the options"),
        ("# port\nport = 'x'", '[port] from pippin.toml:2: unable to convert "x" into int'),
        ("port = [1, 2]", "[port] from pippin.toml:1: unable to convert"),
        ("\nport = 70000", "pippin.toml:2: port must be between 0 and 65535, got 70000"),
        ("backend = 'cuda'", "for [backend] from pippin.toml:1. Choose from: "),
        ("\n[server]\nport = 1", "pippin.toml:2: section [server] is not supported"),
        ("max-queue = 1\n'max_queue' = 2", "max-queue is already set at pippin.toml:1"),
        ("\nport =\n", "pippin.toml: Invalid value (at line 2, column 7)"),
        (
            "api-key = 'secret'",
            "pippin.toml:1: other users can read the value of api-key in this file (mode 644)",
        ),
    ],
)
def test_a_wrong_line_is_named_with_its_file(
    capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    write(text)
    status, error = error_of(capsys, "serve")
    assert status in (1, 2)
    assert message in error
    assert "secret" not in error


def test_a_file_that_was_named_must_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(capsys, "serve", "--config", "nothing.toml") == (
        *(2, "pippin: cannot read nothing.toml: No such file or directory"),
    )
    assert "is a directory" in error_of(capsys, "serve", "--config", ".")[1]


def test_config_prints_what_is_in_force_and_where_it_came_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write("memory = '6GB'\nport = 1\nlog-prompts = true")
    monkeypatch.setenv("PIPPIN_HOST", "::1")
    lines = output_of(capsys, "config", "some/model", "--port", "3").splitlines()
    assert lines[0] == "# read from pippin.toml"
    assert {line for line in lines if line and line[0] != "#"} == {
        'model = "some/model"  # option',
        'memory = "6GB"  # pippin.toml:1',
        'host = "::1"  # PIPPIN_HOST',
        "port = 3  # option",
        "log-prompts = true  # pippin.toml:3",
    }
    assert '# max-running = "auto"' in lines
    assert "# revision =" in lines


def test_what_config_prints_is_a_file_that_says_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["a/model", "--alias", 'x "y"', "--no-overlap", "--max-gap", "0.5", "--memory", "0.7"]
    printed = output_of(capsys, "config", *argv)
    write(printed)
    assert served_with(monkeypatch) == served_with(monkeypatch, "--config", "/dev/null", *argv)
    everything = printed.replace("\n# ", "\n").replace("\nmodel\n", "\n")
    assert (
        tomllib.loads("\n".join(x for x in everything.splitlines() if " = " in x))["port"] == 8000
    )


def test_keys_are_counted_and_never_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write("api-key = ['hidden-1', 'hidden-2']", mode=0o600)
    assert served_with(monkeypatch).server.api_key == ("hidden-1", "hidden-2")
    printed = output_of(capsys, "config")
    assert "# api-key = (2 set, not printed)  # pippin.toml:1" in printed
    assert "hidden" not in printed
    monkeypatch.setenv("PIPPIN_API_KEY", "hidden-3")
    printed = output_of(capsys, "config")
    assert "# api-key = (1 set, not printed)  # PIPPIN_API_KEY" in printed
    assert "hidden" not in printed


def test_without_a_file_config_says_where_it_looked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first = output_of(capsys, "config").splitlines()[0]
    users = tmp_path / "home" / "pippin" / "pippin.toml"
    assert first == f"# no file was found at pippin.toml or {users}"


TABLE = """
port = 0
memory = "12GB"
alias = ["any"]
max-running = 4
[models.small]
model = "some/small"
alias = ["gpt-4o-mini"]
max-model-len = 100
memory = "3GB"
[models.large]
model = "some/large"
speculate = "suffix"
keep-alive = "1h"
"""


@pytest.fixture(autouse=True)
def empty_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


def test_several_models_have_the_options_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared, models = served_models(monkeypatch, "a/b", "./c", "--memory", "6GB", "--alias", "d")
    assert shared.engine.memory == "6GB"
    assert [model.model.model for model in models] == ["a/b", "./c"]
    assert [model.engine.memory for model in models] == ["auto", "auto"], "it is divided"
    assert [model.server.alias for model in models] == [("d",), ()]


def test_one_model_is_served_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served_with(monkeypatch, "a/b").model.model == "a/b"
    assert served_with(monkeypatch).model.model == "stories-hybrid-20m"


def test_a_table_names_its_models_and_overrides_options(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("pippin.toml").write_text(TABLE)
    shared, (small, large) = served_models(monkeypatch)
    assert shared.engine.memory == "12GB"
    assert (small.server.served_name, small.model.model) == ("small", "some/small")
    assert (small.server.alias, small.model.max_len) == (("gpt-4o-mini",), 100)
    assert (small.engine.memory, small.engine.max_running) == ("3GB", 4)
    assert (large.engine.memory, large.engine.speculate) == ("auto", "suffix")
    assert (large.server.alias, large.server.keep_alive) == ((), "1h")
    _, named = served_models(monkeypatch, "large", "other/model")
    assert [model.model.model for model in named] == ["some/large", "other/model"]
    assert named[1].server.served_name is None


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[models.a]\nprot = 1", "models.a.prot is not an option of one model"),
        ("[models.a]\nmax-lem = 1", "did you mean max-len?"),
        ("[models.a]\nport = 1", "models.a.port is not an option of one model"),
        ("[models.a]\nmax-len = 'many'", "models.a.max-len: Expected `int | null`, got `str`"),
        ("[models.a]\nmax-len = 'many'\n[models.b]", "pippin.toml:2: models.a.max-len"),
        (
            "[model.a]\nmodel = 'b'",
            "section [model] is not known: a model's table is [models.NAME]",
        ),
        ("[models.a]\nkeep-alive = 'soon'", "models.a: keep_alive is 'soon'"),
        ("[models]\na = 1", "models.a must be a table"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(
    capsys: pytest.CaptureFixture[str], table: str, message: str
) -> None:
    Path("pippin.toml").write_text(table)
    status, error = error_of(capsys, "serve")
    assert status == 2
    assert message in error
    assert "pippin.toml:" in error


def test_the_table_is_printed_as_it_can_be_read_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("pippin.toml").write_text(TABLE)
    before = served_models(monkeypatch)
    printed = output_of(capsys, "config")
    assert '[models."small"]  # pippin.toml:6' in printed
    Path("pippin.toml").write_text(printed)
    assert served_models(monkeypatch) == before


def test_a_model_that_is_given_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'a/b' is given twice" in error_of(capsys, "serve", "a/b", "a/b")[1]


@pytest.mark.parametrize("option", ["kv-events=tcp://[::1]:5557", "served-name=x", "step-log=s"])
def test_options_of_one_model_are_refused_with_several(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    name, _, value = option.partition("=")
    status, error = error_of(capsys, "serve", "a/b", "c/d", f"--{name}", value)
    assert status == 2
    assert name.replace("-", "_") in error
    assert "2 models are served" in error


def test_a_name_that_is_nearly_one_of_the_table_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("pippin.toml").write_text(TABLE)
    status, error = error_of(capsys, "serve", "smal", "large")
    assert status == 2
    assert "no model 'smal' is in the table" in error
    assert "did you mean small?" in error
