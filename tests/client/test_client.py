"""The query client: what it asks, and how it reads answers that are none."""

import json

import pytest

from noisescale.advice import RecommendRequest
from noisescale.errors import InvalidInputError, NoiseScaleError
from noisescale_client import (
    NoiseScaleClient,
    RequestRefusedError,
    ServerUnreachableError,
    UnauthorizedError,
    UnexpectedAnswerError,
    UnknownRunError,
)
from noisescale_client.processes import free_port
from tests.client.wire_server import Reply, error, wire_server

REQUEST = RecommendRequest.model_validate(
    {
        "global_batch_size": 256,
        "learning_rate": 0.1,
        "optimizer": "sgd",
        "noise_scale": {"value": 15000, "lower": 10000, "upper": 22000},
        "measured_steps": 500,
    }
)


def test_names_and_what_if_fields_travel_as_the_api_has_them() -> None:
    """Run names are escaped in paths, what-if fields are query parameters, booleans are lower case."""
    with wire_server() as server, NoiseScaleClient(server.url, token="t") as client:  # noqa: S106  a test's own
        server.always = Reply(status=200, body=b'{"runs": []}')
        assert client.runs() == []
        for ask in (
            lambda: client.run("a/../b c"),
            lambda: client.series("x", group="layer1"),
            lambda: client.recommend("x", target_dp_world_size=8, batch_norm=True),
            lambda: client.what_if(REQUEST),
        ):
            with pytest.raises(UnexpectedAnswerError):
                ask()
    assert [request.path for request in server.requests] == [
        "/v1/runs?limit=100",
        "/v1/runs/a%2F..%2Fb%20c",
        "/v1/runs/x/series?group=layer1&geometry=euclidean&max_points=300",
        "/recommend?run=x&target_dp_world_size=8&batch_norm=true",
        "/recommend",
    ]
    assert all(request.headers["Authorization"] == "Bearer t" for request in server.requests)
    assert RecommendRequest.model_validate(json.loads(server.requests[-1].body)) == REQUEST


def test_an_unknown_run_names_its_nearest() -> None:
    """404 with the server's code is UnknownRunError, with the names that the server offers."""
    with wire_server() as server, NoiseScaleClient(server.url) as client:
        server.always = error(
            404, "there is no run 'resnet5'; nearest: resnet50", code="unknown_run", nearest=["resnet50"]
        )
        with pytest.raises(UnknownRunError, match="nearest: resnet50") as caught:
            client.run("resnet5")
    assert caught.value.nearest == ("resnet50",)
    assert caught.value.status == 404


def test_other_refusals_keep_status_words_and_fields() -> None:
    """401 says where a token goes; 422 keeps the fields; a page that is no JSON is quoted, shortened."""
    with wire_server() as server, NoiseScaleClient(server.url) as client:
        server.replies = [error(401, "a token is needed")]
        with pytest.raises(UnauthorizedError, match="NOISESCALE_TOKEN"):
            client.runs()
        server.replies = [error(422, "they disagree", fields=["global_batch_size", "micro_batch_size"])]
        with pytest.raises(RequestRefusedError, match="they disagree") as refused:
            client.what_if(REQUEST)
        assert refused.value.fields == ("global_batch_size", "micro_batch_size")
        server.replies = [Reply(status=502, body=b"<html>\n bad   gateway " + b"x" * 10_000)]
        with pytest.raises(RequestRefusedError, match="<html> bad gateway xxx") as proxied:
            client.runs()
        assert proxied.value.status == 502
        assert len(str(proxied.value)) < 300
        server.replies = [Reply(status=404)]
        with pytest.raises(RequestRefusedError, match="Not Found"):
            client.run("x")


@pytest.mark.parametrize("body", [b"", b"hello", b"[]", b'{"runs": [{"run": "x"}]}', b"\xff\xfe"])
def test_an_answer_that_is_none_is_said_to_be(body: bytes) -> None:
    """200 with anything but the expected model is an error that names the URL; it never echoes the body."""
    with wire_server() as server, NoiseScaleClient(server.url) as client:
        server.always = Reply(status=200, body=body)
        with pytest.raises(UnexpectedAnswerError, match=f"{server.url}/v1/runs answered 200"):
            client.runs()


def test_a_server_that_is_not_there() -> None:
    """No listener, no such host: one kind of error, which is a NoiseScaleError and says where it looked."""
    for url in (f"http://127.0.0.1:{free_port()}", "http://no-such-host.invalid"):
        with NoiseScaleClient(url) as client, pytest.raises(ServerUnreachableError, match=url) as caught:
            client.runs()
        assert isinstance(caught.value, NoiseScaleError)


def test_a_kept_connection_that_was_closed_is_opened_again() -> None:
    """A question after the server dropped the idle connection is asked again, and answered."""
    with wire_server() as server, NoiseScaleClient(server.url) as client:
        server.replies = [Reply(status=200, body=b'{"runs": []}'), Reply(cut=0)]
        server.always = Reply(status=200, body=b'{"runs": []}')
        assert client.runs() == []
        assert client.runs() == []
        assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("what_if", "field"),
    [
        ({"target_world_size": 8}, "target_world_size"),
        ({"target_dp_world_size": 0}, "target_dp_world_size"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"optimizer": "rprop"}, "optimizer"),
    ],
)
def test_a_what_if_that_cannot_be_is_refused_before_it_is_sent(
    what_if: dict[str, object], field: str
) -> None:
    """Unknown fields and impossible values are errors by name, without a request."""
    with wire_server() as server, NoiseScaleClient(server.url) as client:
        with pytest.raises(InvalidInputError) as caught:
            client.recommend("x", **what_if)
        assert caught.value.field == field
        assert server.requests == []
