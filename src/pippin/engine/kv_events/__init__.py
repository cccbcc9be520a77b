"""Which blocks of tokens are cached, published for routers; knows no requests and no steps."""
