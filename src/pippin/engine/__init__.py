"""An engine: how it is put together, the process it runs in, and the way to it. Knows no HTTP.

    requests  ──▶  engine_client, watchers  ──▶  a channel  ──▶  message_pump  ──▶  the loop
                   in the server's process                       in the engine's

`run.py` is the engine's process, and `build.py` makes its loop. `AsyncLLM` has both ends of the
channel in one process.
"""
