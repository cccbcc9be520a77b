"""What crosses to and from HTTP clients.

    http/  ──▶  dialects/ with requests/  ──▶  jobs/  ──▶  an engine
           ◀──  dialects/                 ◀──  jobs/  ◀──

`requests/fields.py` has what tables of fields are made of. `routes.py` has all routes, which
`endpoints/` and `batches/` answer; `app.py` makes a server of them.
"""
