"""Tables of the fields of requests, one for each dialect. Knows no reply and no engine.

A row says what a field may hold and what is done with it. Requests are checked by these tables, and
the OpenAPI document and `docs/request-fields.md` are made of them.
"""
