"""`pippin serve` as a service of the user's: systemd on Linux, launchd on macOS.

A definition says what is run; a manager writes it into a file of its own kind, and has the system's
commands start, show and stop it. Knows no model and no command line.
"""
