"""Tiers below the tree in memory."""
