"""APIs that clients speak, one file or folder each. Knows no HTTP, no tokens and no engine.

A dialect reads a JSON body into a neutral request and writes a reply: see `dialect.py`.
"""
