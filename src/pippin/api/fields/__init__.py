"""Tables of the fields of requests, one for each dialect. Knows no reply and no engine.

A row has the values that a field accepts and what is done with it. Requests are checked by these
tables; the OpenAPI document and the tables in `docs/` are made of them.
"""
