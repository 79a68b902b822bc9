"""Builds the server's image from docker/Dockerfile, without a container engine, and runs it.

    python -m tests.deployment.build_image           # as root; needs buildah and mmdebstrap (Debian)
    python -m tests.deployment.build_image --pull    # on the public base image, where a registry is

Without --pull the public base image is stood in for by one of the same name made from Debian's packages: the
same release of Debian, and the same minor version of Python. What is checked:

- it builds, and is under 250 MB;
- it runs as a number that is not root's, holds no torch, no pip and no compiler;
- it serves: /healthz, /readyz, a report sent and read back through /metrics, with the root read-only;
- its health check passes while it serves and fails while it does not;
- SIGTERM ends it with status 0.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.synthetic import blocks_of, gaussian_moments

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
IMAGE = "localhost/noisescale-server:check"
LIMIT_MB = 250
TOKEN = "image-check"  # noqa: S105 - opens nothing but the server under test
DEBIAN_RELEASE = "trixie"
STAND_IN_PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
# As the slim images are made: no documentation, manual pages or translations.
LEFT_OUT = (
    "/usr/share/doc/*",
    "/usr/share/man/*",
    "/usr/share/locale/*",
    "/usr/share/info/*",
    "/usr/share/lintian/*",
)


def say(line: str) -> None:
    """One line of what is going on."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def buildah(*arguments: str) -> str:
    """Run buildah; what it printed.

    Raises:
        subprocess.CalledProcessError: It failed; its own words are on stderr.
    """
    answer = subprocess.run(["buildah", *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return answer.stdout.strip()


def base_image() -> str:
    """The public image that the Dockerfile starts from."""
    froms = [line.split()[1] for line in DOCKERFILE.read_text().splitlines() if line.startswith("FROM ")]
    names = {name for name in froms if ":" in name}
    if len(names) != 1:
        raise SystemExit(f"{DOCKERFILE} was to start from one pinned image, and names {sorted(names)}")
    return names.pop()


def make_stand_in(name: str) -> None:
    """An image of that name made from Debian's packages, with python3 where the public one has it."""
    with tempfile.TemporaryDirectory() as folder:
        tarball = Path(folder) / "rootfs.tar"
        excludes = [f"--dpkgopt=path-exclude={path}" for path in LEFT_OUT]
        mirror = [os.environ["DEBIAN_MIRROR"]] if "DEBIAN_MIRROR" in os.environ else []
        subprocess.run(
            [
                "mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", f"--include={STAND_IN_PACKAGES}",
                *excludes, DEBIAN_RELEASE, str(tarball), *mirror,
            ],
            check=True,
        )  # fmt: skip
        container = buildah("from", "scratch")
        buildah("add", "--quiet", container, str(tarball), "/")
        for link in ("python3", "python"):
            buildah(
                "run",
                "--isolation",
                "chroot",
                container,
                "--",
                "ln",
                "-s",
                "/usr/bin/python3",
                f"/usr/local/bin/{link}",
            )
        buildah(
            "config", "--env", "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", container
        )
        buildah("commit", "--quiet", "--format", "docker", "--rm", container, f"docker.io/library/{name}")


def build(*, pull: bool) -> None:
    """Build the image. This machine's own certificates are lent to the build, not put into the image."""
    certificates = "/etc/ssl/certs"
    volume = ["--volume", f"{certificates}:{certificates}:ro"] if Path(certificates).is_dir() else []
    buildah(
        "build", "--isolation", "chroot", "--format", "docker", "--pull" if pull else "--pull-never",
        "--layers=false", *volume, "--ignorefile", f"{DOCKERFILE}.dockerignore", "--file", str(DOCKERFILE),
        "--tag", IMAGE, str(ROOT),
    )  # fmt: skip


def size_mb() -> float:
    """Of the image unpacked, base included."""
    (size,) = json.loads(buildah("images", "--json", IMAGE))
    text, unit = size["size"].split()
    return float(text) * {"KB": 1e-3, "MB": 1, "GB": 1e3}[unit]


def check_config() -> list[str]:
    """What is wrong with how the image says it is to be run."""
    config = config_of_image()
    faults = []
    user = config["User"].split(":")[0]
    if not user.isdigit() or int(user) == 0:
        faults.append(f"it runs as {config['User']!r}, not as a number other than root's")
    if not config.get("Healthcheck"):
        faults.append("it has no health check")
    if "8000/tcp" not in config.get("ExposedPorts", {}):
        faults.append("it does not say that it listens on 8000")
    secrets = [name for name in config["Env"] if "TOKEN" in name or "PASSWORD" in name]
    return faults + [f"its environment holds {name}" for name in secrets]


def check_contents(root: Path) -> list[str]:
    """What is in the image's files and should not be."""
    faults = []
    for pattern in ("torch", "pip", "numpy", "nvidia*"):
        found = list((root / "opt" / "noisescale").glob(f"lib/python*/site-packages/{pattern}"))
        faults += [f"it holds {path.relative_to(root)}" for path in found]
    faults += [f"it holds {name}" for name in ("cc", "gcc", "make") if (root / "usr" / "bin" / name).exists()]
    if (root / "src").exists():
        faults.append("it holds the source folder of the build")
    return faults


def check_running(root: Path) -> list[str]:
    """Serve from the image's own files, as its user, read-only but for the data folder and /tmp."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as output:
            server = subprocess.Popen(in_image(root, config_of_image()), stdout=output, stderr=output)
        try:
            faults = [*check_serving(root), *check_confined(root)]
            health = healthcheck(root)
            if health != 0:
                faults.append(f"its health check answers {health} while it serves")
        except OSError as error:
            faults = [f"it does not serve: {error}"]
        finally:
            # unshare only waits; the server is its child, the first process of the namespace.
            first = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            for pid in first:
                os.kill(int(pid), signal.SIGTERM)
            status = server.wait(timeout=60)
        if status != 0:
            faults.append(f"SIGTERM ended it with status {status}")
        if healthcheck(root) == 0:
            faults.append("its health check passes while nothing serves")
        if faults:
            say(log.read_text(errors="replace")[-3000:])
    return faults


def config_of_image() -> dict[str, Any]:
    """How the image says it is to be run: User, Env, Entrypoint, Cmd, Healthcheck and so on."""
    config: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", IMAGE))["Docker"]["config"]
    return config


def in_image(root: Path, config: dict[str, Any], command: Sequence[str] = ()) -> list[str]:
    """The command line that runs `command`, or else the image's own, in the image's files."""
    (data,) = config["Volumes"]
    run = command or [*config["Entrypoint"], *config["Cmd"]]
    return [
        "unshare", "--mount", "--pid", "--fork", "--kill-child", "--",
        "env", "--ignore-environment", *config["Env"], f"NOISESCALE_WRITE_TOKENS={TOKEN}",
        f"NOISESCALE_READ_TOKENS={TOKEN}",
        "/bin/sh", str(Path(__file__).parent / "run_in_image.sh"),
        str(root), config["User"].split(":")[0], data, config["WorkingDir"], *run,
    ]  # fmt: skip


def healthcheck(root: Path) -> int:
    """The exit status of the image's health check."""
    config = config_of_image()
    kind, *command = config["Healthcheck"]["Test"]
    if kind != "CMD":
        raise SystemExit(f"the health check was to be a command without a shell, and is {kind}")
    answer = subprocess.run(in_image(root, config, command), check=False, capture_output=True, timeout=30)
    return answer.returncode


def check_serving(root: Path) -> Iterator[str]:
    """Report a block to the server and read it back; what is wrong."""
    wait_until_ready()
    report: dict[str, Any] = {
        "schema_version": 1,
        "attempt": 1,
        "seq": 0,
        "blocks": [
            block.model_dump(mode="json")
            for block in blocks_of(gaussian_moments(steps=300, counts=[16] * 4, seed=1))
        ],
    }
    answer = ask("/v1/runs/image-check/blocks", body=json.dumps(report).encode())
    if json.loads(answer)["accepted"] != len(report["blocks"]):
        yield f"it accepted {answer} of {len(report['blocks'])} blocks"
    if "noisescale_noise_scale{" not in ask("/metrics"):
        yield "its /metrics says nothing of the noise scale that was reported"
    if "process_" not in ask("/metrics/process"):
        yield "its /metrics/process says nothing of the process"
    if (root / "var/lib/noisescale/noisescale.db").exists():
        yield "the database was written into the image"


def check_confined(root: Path) -> Iterator[str]:
    """What a process in the image can do, and should not."""
    program = (
        "import os, pathlib, re\n"
        "for path in ('/x', '/opt/noisescale/x', '/etc/x'):\n"
        "    try: open(path, 'w'); print('it can write to', path)\n"
        "    except OSError: pass\n"
        "for path in ('/tmp/x', 'x'): open(path, 'w').close()\n"
        "status = pathlib.Path('/proc/self/status').read_text()\n"
        "if os.getuid() == 0 or os.getgroups(): print('it is', os.getuid(), os.getgroups())\n"
        "if re.search(r'^Cap(Eff|Bnd|Prm):\\s*0*[1-9a-f]', status, re.M): print('it has capabilities')\n"
    )
    command = in_image(root, config_of_image(), ["python", "-c", program])
    answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    yield from answer.stdout.splitlines()
    if answer.returncode != 0:
        yield f"a program in it fails: {answer.stderr}"


def wait_until_ready() -> None:
    """Until /readyz answers 200; raises OSError after half a minute."""
    for _ in range(150):
        try:
            ask("/readyz")
            return
        except OSError:
            time.sleep(0.2)
    ask("/readyz")


def ask(path: str, *, body: bytes | None = None) -> str:
    """What the server in the image answers."""
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:8000{path}", data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310 - http, on loopback
        text: str = answer.read().decode()
        return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pull", action="store_true", help="pull the public base image instead of standing in"
    )
    parser.add_argument("--keep", action="store_true", help="leave the built image in buildah's storage")
    options = parser.parse_args(arguments)
    missing = [tool for tool in ("buildah", "mmdebstrap", "unshare") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        parser.error(f"this needs root, and {', '.join(missing) or 'nothing else'} (Debian's packages)")
    base = base_image()
    if not options.pull:
        say(f"making a stand-in for {base} from Debian {DEBIAN_RELEASE}")
        make_stand_in(base)
    say(f"building {DOCKERFILE.relative_to(ROOT)}")
    build(pull=options.pull)
    base_mb = json.loads(buildah("images", "--json", base))[0]["size"]
    size = size_mb()
    say(f"size: {size:.0f} MB, of which the base is {base_mb}")
    faults = check_config()
    if size >= LIMIT_MB:
        faults.append(f"it is {size:.0f} MB, and was to be under {LIMIT_MB}")
    container = buildah("from", "--pull-never", IMAGE)
    try:
        root = Path(buildah("mount", container))
        faults += check_contents(root)
        faults += check_running(root)
    finally:
        buildah("rm", container)
        if not options.keep:
            buildah("rmi", IMAGE)
    for fault in faults:
        say(f"FAULT: {fault}")
    say("the image is as it should be" if not faults else f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
