"""Forwards over the pools in plain torch operations: attention, Gated DeltaNet, the layers."""
