"""The page at `/`: its files, and how they are sent.

`files/` is what a browser gets, as it lies there: HTML, CSS and ES modules, without a build step.
"""
