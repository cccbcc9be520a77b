"""What clients of a server see: latency, throughput, and beside other servers. Knows only HTTP.

`serving.py`, `compare.py`, `prefix.py` and `restart.py` are commands; the rest is what they send.
What `prefix.py` tells of cold prompts is measured in one process: see `in_process/cost.py`.
"""
