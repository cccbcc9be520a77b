"""What crosses to and from HTTP clients. Knows no arrays and no scheduler.

    http/  ──▶  dialects/ with requests/  ──▶  jobs/ with grammars/  ──▶  an engine
           ◀──  dialects/                 ◀──  jobs/                 ◀──

`fields/` has the tables of fields. `endpoints/` binds all of it to routes, `app.py` to a server.
"""
