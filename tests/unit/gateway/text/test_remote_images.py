"""Images from elsewhere: only from where the operator says, without detours, and bounded."""

import http.server
import threading

import pytest

from core.errors import BadRequest
from gateway.text.chat import ImagePart
from gateway.text.images import decode_url
from gateway.text.remote_images import RemoteImages

FILE = b"\x89PNG" + bytes(5000)


class Handler(http.server.BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self):
        self.asked.append(self.path)
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("location", "/picture")
            self.end_headers()
            return
        self.send_response(200 if self.path == "/picture" else 404)
        self.end_headers()
        self.wfile.write(FILE)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    handler = type("Handler", (Handler,), {"asked": []})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        made.origin = f"http://127.0.0.1:{made.server_port}"
        made.asked = handler.asked
        yield made
        made.shutdown()
        thread.join()


def part(url: str) -> ImagePart:
    return ImagePart(url, "auto", "messages[0].content[0].image_url")


def test_an_allowed_origin_is_asked(server):
    rules = RemoteImages(origins=(server.origin,))
    assert decode_url(part(f"{server.origin}/picture"), rules) == FILE


def test_nothing_is_fetched_unless_it_is_allowed(server):
    with pytest.raises(BadRequest, match="data: URLs only"):
        decode_url(part(f"{server.origin}/picture"), RemoteImages())
    rules = RemoteImages(origins=("http://127.0.0.1",))
    for url in (
        f"{server.origin}/picture",
        f"http://127.0.0.1@{server.origin[7:]}/picture",
        "file:///etc/passwd",
        "ftp://x/y",
    ):
        with pytest.raises(BadRequest, match="from http://127.0.0.1"):
            decode_url(part(url), rules)
    assert server.asked == []


def test_a_redirect_is_not_followed(server):
    with pytest.raises(BadRequest, match="302"):
        decode_url(part(f"{server.origin}/moved"), RemoteImages(origins=(server.origin,)))
    assert server.asked == ["/moved"]


def test_a_missing_or_large_file_is_refused(server):
    with pytest.raises(BadRequest, match="404"):
        decode_url(part(f"{server.origin}/none"), RemoteImages(origins=(server.origin,)))
    with pytest.raises(BadRequest, match="larger than 100 bytes"):
        decode_url(part(f"{server.origin}/picture"), RemoteImages(origins=(server.origin,), max_bytes=100))
