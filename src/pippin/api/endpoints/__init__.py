"""Endpoints, bound to routes. None knows the scheduler, and none but its own fields."""
