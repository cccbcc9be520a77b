"""What crosses to and from HTTP clients.

    http/  ──▶  dialects/ with requests/  ──▶  job.py with grammar.py  ──▶  an engine
           ◀──  dialects/                 ◀──  job.py                  ◀──

`requests/fields.py` has what tables of fields are made of. `app.py` has all routes, which
`endpoints/` and `batches/` answer, and makes a server of them.
"""
