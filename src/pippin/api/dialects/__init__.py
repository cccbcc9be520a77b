"""APIs that people's tools speak, one file or folder each. Knows no HTTP, no tokens and no engine.

A dialect reads a JSON body into a neutral request (`pippin.api.requests.request`), and writes a
reply's pieces as events or as one object: see `base.py`.
"""
