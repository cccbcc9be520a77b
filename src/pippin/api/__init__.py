"""What crosses to and from HTTP clients. Knows no arrays and no scheduler.

    http/  ──▶  dialects/ with requests/  ──▶  jobs/ with grammars/  ──▶  an engine
           ◀──  dialects/                 ◀──  jobs/                 ◀──

`endpoints/` and `page/` are what else a server answers with. `app.py` puts all of it together.
"""
