"""`pippin serve` as a service of the user's: systemd on Linux, launchd on macOS.

A definition holds what is run; a manager writes it into a file of its own kind, and calls the
system's commands to start, show and stop it. Knows no model and no command line.
"""
