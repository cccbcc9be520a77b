"""`pippin serve A B` and the `[models]` table: a config for each model, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.commands import error_of, output_of, served_models, served_with

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
