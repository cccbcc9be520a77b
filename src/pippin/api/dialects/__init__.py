"""APIs that clients speak, one file or folder each.

A dialect reads a JSON body into a neutral request and writes a reply: see `dialect.py`.
"""
