"""Settings of a client: what is read, what does not fit together, and that they travel."""

from __future__ import annotations

import copy
import json
import pickle
import ssl
from pathlib import Path
from typing import Any

import pytest

from headwater.client.cluster_map import Network
from headwater.client.connection_string import Address
from headwater.client.kv_connection import FEATURES, Timeouts
from headwater.client.settings import AGENT_CHARS_MAX, ClientSettings, TlsSettings
from headwater.errors import InvalidConnectionString, InvalidInput, NotSupported
from headwater.protocol.features import Feature
from headwater.protocol.sasl import Credentials, Mechanism
from support.cases import case
from support.machine import self_signed

URL = "couchbase://a,b:1/travel"
LOGIN = {"user": "ann", "password": "pencil"}


def test_what_is_there_unless_told() -> None:
    settings = ClientSettings.make(URL)
    assert settings.addresses == (Address("a", 11210), Address("b", 1))
    assert settings.bucket == "travel"
    assert settings.credentials is None
    assert settings.tls is None
    assert settings.tls_context() is None
    assert not settings.is_tls
    assert settings.mechanism is None
    assert settings.network is Network.AUTO
    assert settings.features == FEATURES
    assert settings.agent.startswith("headwater/")
    assert settings.timeouts == Timeouts()


def test_all_that_can_be_told() -> None:
    settings = ClientSettings.make(
        "couchbases://a/travel?network=default",
        **LOGIN,
        tls=TlsSettings(skip_verify=True),
        mechanism="SCRAM-SHA256",
        network="external",
        agent="a tool",
        features=(Feature.XERROR,),
        timeouts=Timeouts(connect_s=1, answer_s=2),
    )
    login = settings.login()
    assert login.credentials == settings.credentials == Credentials("ann", "pencil")
    assert login.bucket == "travel"
    assert login.tls is settings.tls_context() is not None
    assert login.tls.verify_mode is ssl.CERT_NONE
    assert login.mechanism is settings.mechanism is Mechanism.SCRAM_SHA256
    assert settings.network is Network.EXTERNAL
    assert (login.agent, login.features, login.timeouts) == (
        "a tool",
        (Feature.XERROR,),
        Timeouts(connect_s=1, answer_s=2),
    )


def test_what_the_url_and_the_keywords_say() -> None:
    make = ClientSettings.make
    assert make("couchbase://ann@a/b", password="p").credentials == Credentials("ann", "p")
    assert make("couchbase://ann@a/b", user="bob", password="p").credentials == Credentials("bob", "p")
    assert make(f"{URL}?network=external").network is Network.EXTERNAL
    assert make(f"{URL}?network=external", network=Network.AUTO).network is Network.AUTO
    assert make("couchbase://a:8091,b,c:9/t").kv_addresses == (Address("b", 11210), Address("c", 9))
    assert make("couchbase://a:8091/t").kv_addresses == ()
    assert make("couchbases://a/b").tls == TlsSettings()
    assert make("couchbases://a/b").is_tls
    certificate = TlsSettings(certificate_file="c.pem", key_file="k.pem")
    assert make("couchbases://a/b", tls=certificate).credentials is None
    assert make("couchbases://a/b", tls=certificate, **LOGIN).credentials is not None


@case("couchbase://a", {}, InvalidConnectionString, "names no bucket", "couchbase://host/bucket")
@case("a/b", {}, InvalidConnectionString, "does not start with", "couchbase://host")
@case(URL, {"tls": TlsSettings()}, InvalidInput, "TLS options were given, but", "couchbases://")
@case(URL, {"password": "p"}, InvalidInput, "a password was given without a user", "Give the user")
@case(URL, {"user": "ann"}, InvalidInput, "the password is missing", "Give both")
@case(URL, {"user": "", "password": "p"}, InvalidInput, "is missing", "Give both")
@case(URL, {"user": "ann", "password": ""}, InvalidInput, "is missing", "Give both")
@case("couchbase://ann@a/b", {}, InvalidInput, "the password is missing", "Give both")
@case(URL, {"user": "a" * 129, "password": "p"}, InvalidInput, "is invalid", "128")
@case(URL, {"user": "a\0", "password": "p"}, InvalidInput, "is invalid", "NUL")
@case(URL, {"user": "ann", "password": "\udc80"}, InvalidInput, "is invalid", "UTF-8")
@case(URL, {"mechanism": "CRAM-MD5", **LOGIN}, InvalidInput, "no mechanism 'CRAM-MD5'", "SCRAM-SHA512")
@case(URL, {"mechanism": "PLAIN"}, InvalidInput, "no user to log in by PLAIN", "Give a user")
@case(URL, {"network": "inside"}, InvalidConnectionString, "no network 'inside'", "auto, default, external")
@case(f"{URL}?network=x", {}, InvalidConnectionString, "no network 'x'", "auto, default, external")
@case(URL, {"agent": ""}, InvalidInput, "can't be the agent's name", "printable")
@case(URL, {"agent": "x" * (AGENT_CHARS_MAX + 1)}, InvalidInput, "can't be the agent's name", "printable")
@case(URL, {"agent": "a\r\nCookie: b"}, InvalidInput, "can't be the agent's name", "printable")
@case(URL, {"agent": "ä"}, InvalidInput, "can't be the agent's name", "ASCII")
@case(URL, {"timeouts": Timeouts(connect_s=0)}, InvalidInput, "must be above 0", "seconds")
@case(URL, {"timeouts": Timeouts(answer_s=-1)}, InvalidInput, "must be above 0", "seconds")
def test_what_does_not_fit_together(
    url: str, options: dict[str, Any], kind: type[InvalidInput], reason: str, hint: str
) -> None:
    with pytest.raises(InvalidInput) as raised:
        ClientSettings.make(url, **options)
    assert type(raised.value) is kind
    assert reason in raised.value.reason
    assert hint in raised.value.hint


def test_settings_travel_without_the_context_of_tls(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    tls = TlsSettings(ca_file=certificate, certificate_file=certificate, key_file=key)
    settings = ClientSettings.make("couchbases://a/b", tls=tls, **LOGIN)
    context = settings.tls_context()
    assert settings.tls_context() is context, "it is made once"
    for travelled in (pickle.loads(pickle.dumps(settings)), copy.deepcopy(settings)):
        assert travelled == settings
        assert "pencil" not in repr(travelled)
        assert "ann" not in str(travelled)
        assert travelled.credentials == Credentials("ann", "pencil")
        assert isinstance(travelled.tls_context(), ssl.SSLContext)
        assert travelled.tls_context() is not context


def test_the_files_of_tls_are_read_when_they_are_needed(tmp_path: Path) -> None:
    settings = ClientSettings.make("couchbases://a/b", tls=TlsSettings(ca_file=tmp_path / "later.pem"))
    with pytest.raises(InvalidInput, match="can't be used"):
        settings.login()
    self_signed(tmp_path)[0].rename(tmp_path / "later.pem")
    assert settings.login().tls is not None


def test_a_later_map_is_of_the_network_of_the_first() -> None:
    node = {"services": {"kv": 1}, "hostname": "in", "alternateAddresses": {"external": {"hostname": "out"}}}
    server_map = {"serverList": ["in:1"], "vBucketMap": [[0]]}
    config = json.dumps({"nodesExt": [node], "vBucketServerMap": server_map}).encode()
    settings = ClientSettings.make(URL)
    first = settings.decode_map(config, asked=Address("out", 1))
    assert first.nodes == (Address("out", 1),)
    elsewhere = Address("alias", 1)
    assert settings.decode_map(config, asked=elsewhere).nodes == (Address("in", 1),)
    assert settings.decode_map(config, asked=elsewhere, network=first.network).nodes == first.nodes


def test_a_server_outside_a_cluster_has_no_map() -> None:
    with pytest.raises(NotSupported, match="a:1 has no cluster config"):
        ClientSettings.make(URL).decode_map(None, asked=Address("a", 1))


def test_anybody_is_trusted_only_if_told() -> None:
    assert TlsSettings().context().verify_mode is ssl.CERT_REQUIRED
    assert TlsSettings().context().check_hostname
    careless = TlsSettings(skip_verify=True).context()
    assert careless.verify_mode is ssl.CERT_NONE
    assert not careless.check_hostname


def test_the_ca_file_replaces_those_of_the_system(tmp_path: Path) -> None:
    certificate, _ = self_signed(tmp_path)
    for file in (certificate, str(certificate)):
        (trusted,) = TlsSettings(ca_file=file).context().get_ca_certs()
        assert trusted["subject"] == ((("commonName", "127.0.0.1"),),)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    junk, missing = tmp_path / "junk.pem", tmp_path / "missing.pem"
    junk.write_text("junk")
    other = tmp_path / "other"
    other.mkdir()
    _, other_key = self_signed(other)
    for settings, what in [
        (TlsSettings(ca_file=junk), "the CA file"),
        (TlsSettings(ca_file=missing), "the CA file"),
        (TlsSettings(certificate_file=missing), "the client certificate"),
        (TlsSettings(certificate_file=junk, key_file=key), "the client certificate"),
        (TlsSettings(certificate_file=certificate), "the client certificate"),
        (TlsSettings(certificate_file=certificate, key_file=other_key), "the client certificate"),
    ]:
        with pytest.raises(InvalidInput, match=rf"^{what} .* can't be used") as raised:
            settings.context()
        assert "PEM" in raised.value.hint
    both = tmp_path / "both.pem"
    both.write_text(certificate.read_text() + key.read_text())
    assert TlsSettings(certificate_file=both).context(), "the key may be in the same file"


def test_a_key_needs_a_certificate() -> None:
    for parts in ({"key_file": "key.pem"}, {"key_password": "sesame"}):
        with pytest.raises(InvalidInput, match="without a client certificate"):
            TlsSettings(**parts)


def test_settings_travel_and_do_not_tell(tmp_path: Path) -> None:
    settings = TlsSettings(ca_file=tmp_path / "ca.pem", certificate_file="c.pem", key_file="k.pem", key_password="s3s")
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert "s3s" not in repr(settings)
