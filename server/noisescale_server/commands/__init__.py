"""Commands of `noisescale-server` that have a module of their own; cli.py registers them."""
