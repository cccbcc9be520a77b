"""The server's side of engines: questions to one, and several as one. Knows no HTTP."""
