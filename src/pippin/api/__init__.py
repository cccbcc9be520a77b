"""What crosses to and from HTTP clients. Knows no arrays and no scheduler."""
