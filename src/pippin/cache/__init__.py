"""The unified radix prefix cache: tokens and opaque payloads."""
