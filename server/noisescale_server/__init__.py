"""The noisescale server: keeps reports, shows them to Prometheus, and advises."""

from noisescale_server.app import create_app
from noisescale_server.settings import Settings

__all__ = ["Settings", "create_app"]
