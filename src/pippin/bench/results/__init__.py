"""Numbers to spreads, tables, JSON and pictures. Measures nothing."""
