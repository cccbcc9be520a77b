"""Where KV and states lie: cells and slots of one memory, counted by who holds them."""
