"""The noisescale command, through typer's runner and as a real process."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from noisescale_client.cli import app
from noisescale_client.processes import free_port

COMMANDS = ("demo", "runs", "show", "recommend", "what-if")
WHAT_IF = (
    "what-if --global-batch-size 256 --learning-rate 0.1 --optimizer sgd "
    "--noise-scale 15000 --lower 10000 --upper 22000"
)


def call(line: str, **environment: str) -> Result:
    return CliRunner().invoke(app, line.split(), env={"COLUMNS": "200", "NO_COLOR": "1"} | environment)


def what_if(line: str) -> dict[str, Any]:
    result = call(f"what-if {line} --json")
    assert result.exit_code == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str) -> None:
    """--help says what the command does and shows it in use."""
    result = call(f"{command} --help")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout
    assert f"noisescale {command}" in result.stdout


def test_the_commands_are_these() -> None:
    """The list that the help test goes through is complete."""
    assert {command.name or command.callback.__name__ for command in app.registered_commands} == {  # type: ignore[union-attr]  # each has a callback
        name.replace("-", "_") if name == "what-if" else name for name in COMMANDS
    }


def test_the_version() -> None:
    """--version prints the package's version and nothing else."""
    result = call("--version")
    assert result.exit_code == 0
    assert result.stdout == f"noisescale {version('noisescale')}\n"


def test_what_if_in_words() -> None:
    """The advice comes as sentences, with now and advised side by side, every rule and its sources."""
    result = call(WHAT_IF)
    assert result.exit_code == 0
    for expected in (
        "raise",
        "Raise the global batch from 256 to 512 examples",
        "noise_aware_sgd",
        "0.1951",
        "McCandlish et al. 2018",
        "measured_steps = 1000 (not given)",
    ):
        assert expected in result.stdout


def test_what_if_as_json_is_the_same_answer_as_the_servers() -> None:
    """--json prints the fields of /recommend, and only that."""
    answer = what_if(WHAT_IF.removeprefix("what-if "))
    assert (answer["action"], answer["global_batch_size"]) == ("raise", 512)
    assert answer["learning_rate"] == pytest.approx(0.1951, abs=5e-5)
    assert answer["measured_steps"] == 1000


def test_what_if_answers_every_row_of_the_vectors() -> None:
    """Each vector that can be said in options gives the same action, batch and rate on the command line."""
    rows = json.loads((Path(__file__).parents[1] / "vectors" / "recommend.json").read_text())
    for row in rows:
        line, expected = " ".join(_as_options(row["request"])), row["response"]
        if expected.get("status") == 422:
            assert call(f"what-if {line}").exit_code == 2, row["name"]
            continue
        answer = what_if(line)
        for field in ("action", "global_batch_size", "layout"):
            if field in expected:
                assert answer[field] == expected[field], (row["name"], field)
        if expected.get("learning_rate") is not None:
            assert answer["learning_rate"] == pytest.approx(expected["learning_rate"], rel=2e-3), row["name"]


def test_a_noise_scale_without_an_interval_is_taken_as_exact_and_said() -> None:
    """A bare --noise-scale is an assumption, and the answer lists it; --lower alone is unbounded above."""
    exact = what_if("--global-batch-size 64 --noise-scale 900")
    assert (exact["noise_scale"]["lower"], exact["noise_scale"]["upper"]) == (900, 900)
    assert any("no --lower was given" in one for one in exact["assumed"])
    bounded = what_if("--global-batch-size 64 --lower 900")
    assert bounded["noise_scale"]["upper"] is None
    assert not any("--lower" in one for one in bounded["assumed"])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("what-if", "give the noise scale"),
        ("what-if --lower 5", "global_batch_size is missing"),
        ("what-if --lower 5 --global-batch-size -3", "global_batch_size: Input should be greater than 0"),
        (
            "what-if --lower 5 --global-batch-size 1e-101",
            "global_batch_size: Input should be from 1e-100 to 1e+100",
        ),
        ("what-if --lower 5 --global-batch-size nan", "global_batch_size: Input should be a finite number"),
        ("what-if --lower 5 --upper 3 --global-batch-size 3", "must be lower <= value <= upper"),
        (
            "what-if --lower 500 --global-batch-size 32 --world-size 3 --micro-batch-size 5 "
            "--accumulation-steps 1",
            "micro_batch_size 5 x dp_world_size 3 x accumulation_steps 1 = 15",
        ),
        ("what-if --lower 5 --global-batch-size 3 --optimizer rprop", "rprop"),
        ("runs --url localhost:8000", "must look like http://HOST:PORT"),
        ("bogus", "bogus"),
        ("demo --steps 0", "--steps"),
    ],
)
def test_what_cannot_be_asked_is_exit_code_2(line: str, expected: str) -> None:
    """A usage error says what is wrong on stderr, prints nothing on stdout, and exits with 2."""
    result = call(line)
    assert result.exit_code == 2
    assert expected in result.stderr
    assert result.stdout == ""


def test_no_server_is_one_line_and_exit_code_1() -> None:
    """Without a server the error is one line on stderr that says where it looked and what to do."""
    url = f"http://127.0.0.1:{free_port()}"
    for line in ("runs", "show x", "recommend x", "runs --json"):
        result = call(line, NOISESCALE_URL=url)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert result.stderr.startswith(
            f"noisescale: no answer from {url}: Connection refused; start a server"
        )
        assert result.stderr.count("\n") == 1


def test_the_command_line_imports_neither_torch_nor_a_drawing_library() -> None:
    """A real process: the installed command answers, and its modules import nothing heavy."""
    code = (
        "import sys, noisescale_client.cli, noisescale_client.demo\n"
        "heavy = {'torch', 'matplotlib', 'numpy', 'fastapi', 'sqlalchemy', 'sklearn'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_installed_command() -> None:
    """`noisescale` is on the path of the environment, answers, and exits with the codes it promises."""
    command = Path(sys.executable).with_name("noisescale")
    done = subprocess.run([command, *WHAT_IF.split(), "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["action"] == "raise"
    down = subprocess.run(
        [command, "runs", "--url", f"http://127.0.0.1:{free_port()}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (down.returncode, down.stdout) == (1, "")
    assert "Traceback" not in down.stderr


def _as_options(request: dict[str, Any]) -> list[str]:
    """A request of /recommend as command-line options."""
    names = {"dp_world_size": "world-size", "target_dp_world_size": "target-world-size"}
    options: list[str] = []
    for field, value in request.items():
        if value is None:
            continue
        option = f"--{names.get(field, field).replace('_', '-')}"
        if field == "noise_scale":
            ends = {"noise-scale": value.get("value"), "lower": value["lower"], "upper": value.get("upper")}
            options += [part for k, v in ends.items() if v is not None for part in (f"--{k}", str(v))]
        elif field == "tuned":
            options += ["--tuned-global-batch-size", str(value["global_batch_size"])]
            options += ["--tuned-learning-rate", str(value["learning_rate"])]
        elif isinstance(value, bool):
            options.append(option if value else option.replace("--", "--no-", 1))
        else:
            options += [option, str(value)]
    return options
