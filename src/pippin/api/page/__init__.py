"""The page at `/`: its files, and how they are sent. Knows no engine; the page uses the API.

`files/` is what a browser gets, as it lies there: HTML, CSS and ES modules, without a build step.
"""
