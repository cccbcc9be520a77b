"""The unified radix prefix cache: tokens and opaque payloads. Knows no arrays."""
