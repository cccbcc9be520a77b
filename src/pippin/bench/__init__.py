"""`pippin bench serve`. Developers' benchmarks are in tools/bench/, on the same client."""
