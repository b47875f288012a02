"""gRPC's credentials for mutual TLS, made from files that may be renewed while the process runs."""

import logging

import grpc

from core.errors import ConfigError
from core.tls import Pem, TlsSection, read_pem

logger = logging.getLogger(__name__)


def channel_credentials(section: TlsSection) -> tuple[grpc.ChannelCredentials, tuple[tuple[str, str], ...]]:
    """Return a client's credentials and the channel options that go with them; raises `ConfigError`."""
    pem = read_pem(section)
    credentials = grpc.ssl_channel_credentials(pem.authority, pem.key, pem.certificate)
    return credentials, (("grpc.ssl_target_name_override", section.peer_name),)


def server_credentials(section: TlsSection) -> grpc.ServerCredentials:
    """Return a server's credentials, which refuse callers without a certificate of ours; raises `ConfigError`."""
    last = read_pem(section)

    def renewed() -> grpc.ServerCertificateConfiguration:
        """Called by gRPC before each handshake."""
        nonlocal last
        try:
            last = read_pem(section)
        except ConfigError as error:
            logger.warning("the old certificate stays in use: %s", error.message)
        return _configuration(last)

    return grpc.dynamic_ssl_server_credentials(_configuration(last), renewed, require_client_authentication=True)


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.authority)
