"""`python -m noisescale_client`."""

from noisescale_client.cli import main

main()
