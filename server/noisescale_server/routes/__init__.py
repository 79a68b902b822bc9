"""The HTTP endpoints, one module per subject."""
