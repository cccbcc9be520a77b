"""`pippin service` with a system that notes what it is told."""

from __future__ import annotations

import os
import plistlib
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cases import cases
from cli.commands import error_of, output_of
from pippin import cli
from pippin.cli.service import Definition, Launchd, Systemd, quote


class FakeCommands:
    """`systemctl`, `loginctl` and `launchctl` that note what they were told, first on PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._log = folder / "log"
        folder.mkdir()
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    def add(self, name: str, script: str = "") -> None:
        """A command that runs `script`, a shell's, after noting its arguments."""
        path = self._folder / name
        path.write_text(f'#!/bin/sh\necho {name} "$@" >> "{self._log}"\n{script}\n')
        path.chmod(0o755)

    def told(self) -> list[str]:
        """What they were told since the last time, in order."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        return lines


SHOW = "show) printf 'ActiveState=active\\nSubState=running\\nMainPID=42\\nNRestarts=0\\n' ;;"

LAUNCHCTL_PRINT = r"gui/1/x = {\n\tstate = running\n\tpid = 42\n\tsub = {\n\t\tstate = 0\n\t}\n}\n"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    for name in [name for name in os.environ if name.startswith(("PIPPIN_", "HF_"))]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCommands:
    return FakeCommands(tmp_path / "bin", monkeypatch)


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch, commands: FakeCommands) -> FakeCommands:
    monkeypatch.setattr("pippin.cli.service.PLATFORM", "linux")
    commands.add("systemctl", f'case "$2" in {SHOW} esac')
    commands.add("loginctl", "echo Linger=no")
    return commands


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch, commands: FakeCommands, home: Path) -> FakeCommands:
    """launchctl knows the agent between bootstrap and bootout."""
    monkeypatch.setattr("pippin.cli.service.PLATFORM", "darwin")
    loaded = home / "loaded"
    commands.add(
        "launchctl",
        f"""
        case "$1 $2" in
            bootstrap*) touch "{loaded}" ;;
            bootout*) rm "{loaded}" ;;
            "print gui/"*/*) [ -e "{loaded}" ] || exit 113
                printf '{LAUNCHCTL_PRINT}' ;;
        esac
        """,
    )
    return commands


def test_on_linux_a_unit_is_written_enabled_and_started(
    linux: FakeCommands, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    said = output_of(capsys, "service", "install", "--", "some/model", "--port", "9000")
    unit = home / ".config" / "systemd" / "user" / "pippin.service"
    text = unit.read_text()
    assert f"ExecStart={quote(sys.executable)} -P -m pippin serve some/model --port 9000\n" in text
    assert f"WorkingDirectory={home / 'here'}\n" in text
    assert "Restart=on-failure\n" in text
    assert "WantedBy=default.target\n" in text
    assert stat.S_IMODE(unit.stat().st_mode) == 0o600
    assert [line for line in linux.told() if "show" not in line] == [
        "systemctl --user daemon-reload",
        "systemctl --user enable pippin.service",
        "systemctl --user restart pippin.service",
    ]
    assert "http://127.0.0.1:9000" in said
    assert "loginctl enable-linger" in said
    assert "Logs: journalctl --user -u pippin -f" in said


def test_on_linux_it_is_shown_and_removed(
    linux: FakeCommands, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    output_of(capsys, "service", "install", "--name", "second", "--", "some/model")
    unit = home / ".config" / "systemd" / "user" / "second.service"
    shown = output_of(capsys, "service", "status", "--name", "second")
    assert "second is active (running), process 42" in shown
    assert str(unit) in shown
    linux.told()
    output_of(capsys, "service", "uninstall", "--name", "second")
    assert linux.told()[0] == "systemctl --user disable --now second.service"
    assert not unit.exists()
    for command in ("status", "uninstall"):
        status, error = error_of(capsys, "service", command, "--name", "second")
        assert status == 1
        assert f"no service is installed ({unit} does not exist): run `pippin service" in error


def test_a_service_that_does_not_run_is_told_by_its_exit_status(
    linux: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    output_of(capsys, "service", "install", "--", "some/model")
    linux.add(
        "systemctl", "printf 'ActiveState=failed\\nSubState=failed\\nMainPID=0\\nNRestarts=7\\n'"
    )
    with pytest.raises(SystemExit) as exited:
        cli.main(["service", "status"])
    assert exited.value.code == 3
    assert "pippin is failed (failed), restarted 7 times" in capsys.readouterr().out


def test_nothing_is_written_where_there_is_no_session(
    linux: FakeCommands, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    linux.add("systemctl", "echo Failed to connect to bus >&2; exit 1")
    status, error = error_of(capsys, "service", "install", "--", "some/model")
    assert status == 1
    assert "Failed to connect to bus" in error
    assert not (home / ".config" / "systemd").exists()


def test_on_macos_an_agent_is_written_and_loaded(
    macos: FakeCommands, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    argv = ["service", "install", "--", "some/model", "--drain-timeout", "5"]
    said = output_of(capsys, *argv)
    path = home / "Library" / "LaunchAgents" / "pippin.agent.plist"
    agent = plistlib.loads(path.read_bytes())
    assert agent["Label"] == path.stem
    assert agent["ProgramArguments"] == [
        *(sys.executable, "-P", "-m", "pippin", "serve"),
        *("some/model", "--drain-timeout", "5"),
    ]
    assert agent["WorkingDirectory"] == str(home / "here")
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert (agent["RunAtLoad"], agent["ExitTimeOut"]) == (True, 20)
    log = Path(agent["StandardErrorPath"])
    assert log.is_file()
    assert f"Logs: tail -F {log}" in said
    domain = f"gui/{os.getuid()}"
    assert [line for line in macos.told() if "print" not in line] == [
        f"launchctl enable {domain}/pippin.agent",
        f"launchctl bootstrap {domain} {path}",
    ]
    output_of(capsys, *argv)  # again: the first one makes room
    assert f"launchctl bootout {domain}/pippin.agent" in macos.told()
    assert "pippin is running, process 42" in output_of(capsys, "service", "status")
    output_of(capsys, "service", "uninstall")
    assert not path.exists()
    assert error_of(capsys, "service", "status")[0] == 1


@pytest.mark.usefixtures("linux")
def test_print_shows_the_file_and_does_nothing(
    linux: FakeCommands, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    assert "ExecStart=" in output_of(capsys, "service", "install", "--print", "--", "some/model")
    assert linux.told() == []
    assert not (home / ".config").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--", "--prot", "1"], "Did you mean --port?"),
        (["--", "--port", "70000"], "port must be between 0 and 65535"),
        (["--", "nothing-there"], "no model 'nothing-there'"),
        (["--", "--api-key", "secret"], "use --api-key-file"),
        (["--name", "../x"], "is not a service name: use letters, digits, dots"),
    ],
)
@pytest.mark.usefixtures("linux")
def test_what_could_not_be_served_is_not_installed(
    capsys: pytest.CaptureFixture[str], home: Path, argv: list[str], message: str
) -> None:
    status, error = error_of(capsys, "service", "install", *argv)
    assert status != 0
    assert message in error
    assert "secret" not in error
    assert not (home / ".config").exists()


@pytest.mark.usefixtures("linux")
@pytest.mark.parametrize("variable", ["PIPPIN_API_KEY", "PIPPIN_PORT", "PIPPIN_CONFIG"])
def test_a_variable_that_the_service_would_not_see_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str
) -> None:
    monkeypatch.setenv(variable, "/dev/null" if variable == "PIPPIN_CONFIG" else "1234")
    status, error = error_of(capsys, "service", "install", "--", "some/model")
    assert status == 2
    assert f"a service does not inherit {variable}" in error
    assert "1234" not in error


@pytest.mark.usefixtures("linux")
def test_keys_in_a_file_stay_there(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    file = Path("pippin.toml")
    file.write_text("model = 'some/model'\napi-key = 'secret'\n")
    file.chmod(0o600)
    said = output_of(capsys, "service", "install")
    assert f"It reads {file.resolve()}" in said
    unit = (home / ".config" / "systemd" / "user" / "pippin.service").read_text()
    assert "secret" not in said + unit


@pytest.mark.usefixtures("commands")
def test_other_systems_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pippin.cli.service.PLATFORM", "freebsd")
    assert "services are not supported on freebsd" in error_of(capsys, "service", "status")[1]


ODD_WORDS = (
    "with a space",
    'quo"te',
    "it's",
    "100%",
    "$HOME",
    "back\\slash",
    "semi;colon",
    "ü",
    "",
)


def definition(directory: Path, *words: str) -> Definition:
    command = ("/bin/echo", *words)
    return Definition("pippin", command, directory, 35, {"HF_HOME": "/models of mine/100%"})


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_finds_nothing_wrong_with_a_unit(tmp_path: Path) -> None:
    unit = tmp_path / "pippin.service"
    unit.write_text(Systemd("pippin").text(definition(tmp_path, "--alias", *ODD_WORDS)))
    verified = subprocess.run(
        ["systemd-analyze", "--user", "--man=no", "verify", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    about_it = [line for line in verified.stderr.splitlines() if "pippin.service" in line]
    assert (verified.returncode, about_it) == (0, [])


@cases(
    ("word", "written"),
    [
        ("plain-word=1", "plain-word=1"),
        ("with a space", '"with a space"'),
        ("100%", "100%%"),  # systemd(5): % begins a specifier
        ("$HOME", "$$HOME"),  # systemd.service(5): $ begins a variable
        ('quo"te', r'"quo\"te"'),
        ("back\\slash", r'"back\\slash"'),
        ("two\nlines", r'"two\nlines"'),
        ("", '""'),
    ],
)
def test_a_word_means_itself_to_systemd(word: str, written: str) -> None:
    assert quote(word) == written


def test_an_agent_is_a_property_list_that_keeps_every_word(tmp_path: Path) -> None:
    agent = plistlib.loads(Launchd("pippin").text(definition(tmp_path, *ODD_WORDS)).encode())
    assert agent["ProgramArguments"] == ["/bin/echo", *ODD_WORDS]
    assert agent["EnvironmentVariables"]["HF_HOME"] == "/models of mine/100%"
