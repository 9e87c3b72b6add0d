"""The name in a client certificate: its one URI (SPIFFE) name, else its one DNS name, else its common name."""

from __future__ import annotations

from cryptography import x509

from broker.errors import Unauthenticated


def name_in_certificate(pem: bytes) -> tuple[str, int]:
    """Return the name in a client certificate, and until when (ms since the epoch) that is good.

    Raises Unauthenticated if it names nobody, or several.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        name = _name_in(certificate)
    except (ValueError, x509.DuplicateExtension, x509.InvalidVersion) as error:
        raise _invalid("The client certificate cannot be read") from error
    return name, int(certificate.not_valid_after_utc.timestamp() * 1000)


def _name_in(certificate: x509.Certificate) -> str:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    for kind in (x509.UniformResourceIdentifier, x509.DNSName):
        names_of_kind = names.get_values_for_type(kind)
        if len(names_of_kind) > 1:
            raise _invalid("The client certificate has several names of one kind")
        if names_of_kind:
            return str(names_of_kind[0])
    common = [
        str(attribute.value)
        for attribute in certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    ]
    # A common name is free text: it must not pass for a URI.
    if len(common) != 1 or "/" in common[0]:
        raise _invalid("The client certificate names nobody")
    return common[0]


def _invalid(message: str) -> Unauthenticated:
    return Unauthenticated(message, reason="CREDENTIALS_INVALID")
