"""KV identity (decision A4): namespace -> keyed root per tenant and salt -> SHA-256 page chain.

The one definition for gateway and engine. The namespace holds meaning only (what the numbers in a page mean),
never ranks, addresses or layouts. Hashes are 32 bytes.
"""

import hashlib
import hmac
import struct
from collections.abc import Sequence

import msgspec

from core.ids import PageHash

SCHEMA = 1
PROTOCOL_VERSION = 1
"""Bumped when peers of different versions could no longer exchange KV or requests."""

_NO_DIGESTS = struct.pack("<I", 0)


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """What a cached page means. Two processes share pages only if all fields are equal."""

    schema: int = SCHEMA
    model: str
    revision: str
    """Digest of config and weights as the loader knows them."""
    weights_epoch: int = 0
    tokenizer: str
    """Digest of the tokenizer file."""
    kv_dtype: str
    page_tokens: int
    mode: str = "exact"
    """``exact`` or ``replay`` (A10)."""

    def encode(self) -> bytes:
        """Canonical form: per field tag u8, presence u8, length u32 LE, bytes; fields in declaration order."""
        parts: list[bytes] = []
        for tag, field in enumerate(self.__struct_fields__):
            value = str(getattr(self, field)).encode()
            parts.append(struct.pack("<BBI", tag, 1, len(value)) + value)
        return b"".join(parts)


def namespace_field(namespace: bytes, name: str) -> str:
    """Return one field of an encoded `Namespace`; empty if the bytes are none of this form."""
    at = 0
    try:
        for field in Namespace.__struct_fields__:
            size = struct.unpack_from("<BBI", namespace, at)[2]
            at += 6 + size
            if field == name and at <= len(namespace):
                return namespace[at - size : at].decode()
    except (struct.error, UnicodeDecodeError):
        pass
    return ""


def fingerprint(namespace: bytes, draft_config: str = "", protocol: int = PROTOCOL_VERSION) -> bytes:
    """SHA-256 of the encoded namespace, the draft model's config and the protocol version (A9): equals only."""
    body = struct.pack("<II", protocol, len(namespace)) + namespace + draft_config.encode()
    return hashlib.sha256(body).digest()


def check_value(secret: bytes, incarnation: str) -> bytes:
    """Prove knowledge of the cluster secret for one incarnation without revealing it."""
    return hmac.new(secret, b"tandem-check" + incarnation.encode(), hashlib.sha256).digest()


class PageHasher:
    """Hashes pages of one namespace. Stateless after construction; safe from any thread."""

    def __init__(self, secret: bytes, namespace: bytes, page_tokens: int) -> None:
        self._secret = secret
        self._namespace = namespace
        self.page_tokens = page_tokens

    def root(self, tenant: str = "", salt: str = "", lora: str = "") -> PageHash:
        """Keyed root of the chain: pages of other tenants or salts can neither collide nor be guessed."""
        fields = b"".join(struct.pack("<I", len(part)) + part for part in (x.encode() for x in (tenant, salt, lora)))
        return PageHash(
            hmac.new(
                self._secret, struct.pack("<I", len(self._namespace)) + self._namespace + fields, hashlib.sha256
            ).digest()
        )

    def extend(
        self,
        previous: PageHash,
        token_ids: Sequence[int],
        mm_digests: Sequence[Sequence[bytes]] = (),
    ) -> tuple[PageHash, ...]:
        """Hash the full pages of `token_ids`, which start at a page border right after `previous`.

        A trailing partial page is ignored. `mm_digests[i]` are the digests of images in page i, in order.
        """
        count = len(token_ids) // self.page_tokens
        size = 4 * self.page_tokens
        body = struct.pack(f"<{count * self.page_tokens}i", *token_ids[: count * self.page_tokens])
        hashes: list[PageHash] = []
        for index in range(count):
            digests = mm_digests[index] if index < len(mm_digests) else ()
            named = struct.pack("<I", len(digests)) + b"".join(digests) if digests else _NO_DIGESTS
            page = body[index * size : (index + 1) * size]
            previous = PageHash(hashlib.sha256(previous + named + page).digest())
            hashes.append(previous)
        return tuple(hashes)

    def behind_hit(self, previous: PageHash, encoder_floor: int) -> PageHash:
        """Return where the chain goes on behind a hit that ends with page `previous` and was replayed from a floor on.

        Pages from there on are approximations that this floor determines: they share no hash with other ones.
        """
        return PageHash(hashlib.sha256(previous + b"behind" + struct.pack("<I", encoder_floor)).digest())


def image_digest(height: int, width: int, pixels: bytes) -> bytes:
    """Name an image as the model sees it: SHA-256 of its size and its uint8 RGB pixels."""
    return hashlib.sha256(b"image1" + struct.pack("<II", height, width) + pixels).digest()


def image_pages(
    spans: Sequence[tuple[int, int, bytes]], page_tokens: int, first: int, count: int
) -> tuple[tuple[bytes, ...], ...]:
    """Return the `mm_digests` of pages [first, first + count) for `PageHasher.extend`.

    `spans` are (start, end, digest) of a request's images by token position, ascending. A page that holds any
    position of an image names it, so that pages which end inside one tell images apart.
    """
    if not spans:
        return ()
    pages: list[tuple[bytes, ...]] = []
    for page in range(first, first + count):
        start, end = page * page_tokens, (page + 1) * page_tokens
        pages.append(tuple(digest for low, high, digest in spans if low < end and high > start))
    return tuple(pages)


def event_hash(page_hash: PageHash) -> int:
    """Signed 64-bit name of a page in KV events: never reveals the chain."""
    return int.from_bytes(hashlib.sha256(b"ev1" + page_hash).digest()[:8], "little", signed=True)
