"""From options to a server: a model's files, what a config leaves open, processes, the socket."""
