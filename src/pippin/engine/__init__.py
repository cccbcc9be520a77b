"""An engine: how it is put together, the process it runs in, and the way to it.

requests  ──▶  engine_pool, engine_client  ──▶  a channel  ──▶  run  ──▶  the loop
               in the server's process                          in the engine's
"""
