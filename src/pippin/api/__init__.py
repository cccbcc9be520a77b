"""What crosses to and from HTTP clients.

    http/  ──▶  dialects/ with requests/  ──▶  jobs/ with grammars/  ──▶  an engine
           ◀──  dialects/                 ◀──  jobs/                 ◀──

`fields/` has the tables of fields. `routes.py` has all routes, which `endpoints/` and `batches/`
answer; `app.py` makes a server of them.
"""
