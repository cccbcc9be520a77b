"""The client's end: requests out, recordings of what came and when. Knows no server."""
