"""A deployment of several engines on Ray Serve. Imports Ray only where it is used."""
