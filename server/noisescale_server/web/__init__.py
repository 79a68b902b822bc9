"""The built-in page: what a browser gets at `/`. Rendered here; the scripts only keep it fresh and draw.

`listing`, `run_view`, `compare` and `planner` work out what each page shows, `charts` what is
drawn; `pages` makes HTML of it.
"""
