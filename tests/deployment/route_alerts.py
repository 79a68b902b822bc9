"""Has a real Alertmanager route alerts that a real Prometheus raised; takes about four minutes.

    python -m tests.deployment.route_alerts      # needs Debian's prometheus and prometheus-alertmanager

A run is reported to a real server; then the server is killed. Prometheus, with the rules under docker/, must
raise NoisescaleTargetDown, and Alertmanager, with alertmanager.example.yml, must hand it to the receiver
of the server's keepers and to nobody else; then the server comes back, and they must hear that too.
amtool says where each other alert would go.
"""

import contextlib
import http.server
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.deployment.stack import DOCKER, Job, running_stack
from tests.services import free_port, stop, wait_until

EXPECTED = {"critical": "keepers", "warning": "runs", "info": "advice"}
EXAMPLE = DOCKER / "prometheus" / "alertmanager.example.yml"


def say(line: str) -> None:
    """One line, with the time."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()


class Receivers(http.server.ThreadingHTTPServer):
    """Takes webhooks; what came, as (receiver, status, alert name)."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, str]] = []
        super().__init__(("127.0.0.1", 0), Hook)


class Hook(http.server.BaseHTTPRequestHandler):
    """One webhook."""

    server: Receivers

    def do_POST(self) -> None:
        """Note every alert of the message."""
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for alert in message["alerts"]:
            name, status = alert["labels"]["alertname"], alert["status"]
            self.server.heard.append((self.path.strip("/"), status, name))
            say(f"{self.path} hears: {status} {name}: {alert['annotations']['summary']}")
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing: what matters is said above."""


@contextlib.contextmanager
def running_alertmanager(folder: Path, receivers: Receivers) -> Iterator[int]:
    """Debian's Alertmanager on the example's routes, its receivers here; its port."""
    config = yaml.safe_load(EXAMPLE.read_text())
    for receiver in config["receivers"]:
        for hook in receiver["webhook_configs"]:
            hook["url"] = f"http://127.0.0.1:{receivers.server_port}/{receiver['name']}"
    path = folder / "alertmanager.yml"
    path.write_text(yaml.safe_dump(config))
    storage = folder / "alertmanager"
    port = free_port()
    with (folder / "alertmanager.log").open("wb") as output:
        process = subprocess.Popen(
            [
                "prometheus-alertmanager", f"--config.file={path}", f"--storage.path={storage}",
                f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=",
            ],
            stdout=output,
            stderr=output,
        )  # fmt: skip
    try:
        yield port
    finally:
        stop(process)


def routes() -> Iterator[str]:
    """Faults in where amtool says each alert goes."""
    subprocess.run(["amtool", "check-config", EXAMPLE], check=True, stdout=subprocess.DEVNULL)
    for path in sorted((DOCKER / "prometheus" / "rules").glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                if "alert" in rule:
                    labels = [f"alertname={rule['alert']}", f"severity={rule['labels']['severity']}"]
                    command = ["amtool", "config", "routes", "test", f"--config.file={EXAMPLE}", *labels]
                    answer = subprocess.run(
                        command, check=True, capture_output=True, text=True
                    ).stdout.strip()
                    say(f"{rule['alert']} ({rule['labels']['severity']}) goes to {answer}")
                    if answer != EXPECTED[rule["labels"]["severity"]]:
                        yield f"{rule['alert']} goes to {answer}"


def main() -> int:
    """Run the command; the exit status."""
    faults = list(routes())
    receivers = Receivers()
    threading.Thread(target=receivers.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as text, running_alertmanager(Path(text), receivers) as port:
        with running_stack(Path(text), alertmanager=f"127.0.0.1:{port}") as (server, prometheus):
            Job(server, "digits").train(400)
            wait_until(lambda: prometheus.query("noisescale_noise_scale"), what="a scraped run")
            server.kill()
            say("the server is killed")
            down = ("keepers", "firing", "NoisescaleTargetDown")
            wait_until(lambda: down in receivers.heard, timeout_s=240, what="the alert at its receiver")
            server.start_again()
            say("the server is back")
            up = ("keepers", "resolved", "NoisescaleTargetDown")
            wait_until(lambda: up in receivers.heard, timeout_s=420, what="the all-clear at its receiver")
        faults += [f"{heard} was not expected" for heard in receivers.heard if heard not in (down, up)]
    for fault in faults:
        say(f"FAULT: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
