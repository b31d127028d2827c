"""Several processes that run one program: starting them, finding each other, failing together."""
