"""HTTP: access control, limits of size and time, ids, logs, streams, errors."""
