"""The error tree: stable codes, one mapping, and the way over the wire and back."""

import http

import grpc
import pytest

from core.errors import BY_CODE, NoCapacity, TandemError, from_code


def tree(kind=TandemError):
    # Other packages' own errors are subclasses too, where a test of theirs has been imported before.
    ours = [child for child in kind.__subclasses__() if child.__module__ == TandemError.__module__]
    return [kind, *(leaf for child in ours for leaf in tree(child))]


def test_every_error_has_a_code_of_its_own_and_a_plain_sentence():
    assert len({kind.code for kind in tree()}) == len(tree()) == len(BY_CODE)
    assert all(kind.__doc__ for kind in tree())


@pytest.mark.parametrize("kind", tree(), ids=lambda kind: kind.__name__)
def test_each_maps_to_a_real_grpc_status_and_an_http_error(kind):
    assert kind.grpc_status in grpc.StatusCode.__members__
    assert kind.http_status == 499 or http.HTTPStatus(kind.http_status) >= 400


@pytest.mark.parametrize("kind", tree(), ids=lambda kind: kind.__name__)
def test_an_error_survives_the_wire(kind):
    error = from_code(kind.code, "why", param="p", retry_after_s=2.0)
    assert type(error) is kind
    assert (error.message, error.param, error.retry_after_s, str(error)) == ("why", "p", 2.0, "why")


def test_a_code_of_a_newer_version_becomes_the_base_error():
    assert type(from_code("not-known-yet", "why")) is TandemError


def test_capacity_may_be_asked_elsewhere_and_says_when():
    assert NoCapacity("full", retry_after_s=1.5).retry_after_s == 1.5
    assert NoCapacity.retryable
