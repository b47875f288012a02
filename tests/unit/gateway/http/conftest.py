import functools

import pytest

from gateway.text.tokenizer import Tokenizer
from tests.fakes.http_api import Serve, serve_api
from tests.fakes.tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Serve:
    """Serves a scripted generator over uvicorn on a free port."""
    return functools.partial(_serve, tokenizer)


def _serve(tokenizer: Tokenizer, generator, config=None):
    return serve_api(generator, tokenizer, config)
