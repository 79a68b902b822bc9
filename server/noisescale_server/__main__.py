"""`python -m noisescale_server`."""

from noisescale_server.cli import main

main()
