"""Where KV and states lie: cells and slots of one memory, counted by holders."""
