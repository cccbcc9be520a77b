"""`pippin completion`: scripts that let a shell complete commands and options."""

from __future__ import annotations

from typing import Literal

from cyclopts import App


def add_completion(app: App) -> None:
    """Give an app `completion`, which prints a script, and --install-completion."""

    @app.command
    def completion(shell: Literal["bash", "zsh", "fish"]) -> None:
        """Print a script that completes commands and options in a shell.

        `pippin --install-completion` puts it where the shell finds it.

        Parameters
        ----------
        shell
            The shell, for instance in ~/.bashrc: `source <(pippin completion bash)`.
        """
        print(app.generate_completion(shell=shell), end="")

    app.register_install_completion_command(
        help="Let your shell complete commands and options, from its next start on."
    )
