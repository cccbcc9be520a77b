"""`pippin completion`: scripts that let a shell complete commands and options."""

from __future__ import annotations

from typing import Literal

from cyclopts import App


def add_completion(app: App) -> None:
    """Give an app `completion`, which prints a script, and --install-completion."""

    @app.command
    def completion(shell: Literal["bash", "zsh", "fish"]) -> None:
        """Print a shell script that completes commands and options.

        `pippin --install-completion` installs it for your shell.

        Parameters
        ----------
        shell
            Shell to write the script for. In ~/.bashrc, for example: `source <(pippin completion
            bash)`.
        """
        print(app.generate_completion(shell=shell), end="")

    app.register_install_completion_command(
        help="Install completion of commands and options in your shell, from its next start on."
    )
