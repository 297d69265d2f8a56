"""Handlers that set up a connection: HELLO, SASL log-in, bucket and cluster config; also noop, version and quit."""

from __future__ import annotations

from collections.abc import Callable

from headwater.errors import AuthenticationFailed, LocalProtocolError, MalformedJson, RemoteProtocolError
from headwater.log_fields import LogEvent
from headwater.node.auth.login_checks import LoginAttempt, LoginOutcome, LoginVerdict
from headwater.node.auth.users import Action
from headwater.node.kv.context import Context, PendingLogin
from headwater.protocol.features import FEATURE_NEEDS, Feature, Negotiated
from headwater.protocol.messages import session as messages
from headwater.protocol.messages.base import PlainResponse
from headwater.protocol.sasl import Mechanism, PlainLogin, ScramServer, encode_nonce
from headwater.protocol.status import ERROR_MAP_VERSION, RequestRefused, Status, error_map

SERVED_FEATURES = frozenset(
    {
        Feature.TCP_NODELAY,
        Feature.MUTATION_SEQNO,
        Feature.XATTR,
        Feature.XERROR,
        Feature.SELECT_BUCKET,
        Feature.SNAPPY,
        Feature.JSON,
        Feature.UNORDERED_EXECUTION,
        Feature.TRACING,
        Feature.ALT_REQUEST,
        Feature.SYNC_REPLICATION,
        Feature.COLLECTIONS,
        Feature.SNAPPY_EVERYWHERE,
        Feature.PRESERVE_TTL,
        Feature.VATTR,
        Feature.SUBDOC_CREATE_AS_DELETED,
        Feature.SUBDOC_DOCUMENT_MACROS,
        Feature.NON_BLOCKING_THROTTLING,
        Feature.SUBDOC_REPLICA_READ,
        Feature.GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION,
        Feature.DEDUPE_NMVB_CLUSTERMAP,
        Feature.SUBDOC_BINARY_XATTR,
        Feature.RANGE_SCAN_INCLUDE_XATTR,
        Feature.SUBDOC_REPLICA_READ_OF_DELETED,
        Feature.GET_RANDOM_KEY_INCLUDE_XATTR,
    }
)
"""With unordered execution, requests overtake those that wait for a durable write. With tracing, responses say how long
the node took. Three features allow a server what this one never does: it compresses only documents
(`SNAPPY_EVERYWHERE`), throttles no request, and always sends the cluster config with NOT_MY_VBUCKET
(`DEDUPE_NMVB_CLUSTERMAP`)."""

_NONCE_BYTES = 18


def hello(context: Context, request: messages.Hello) -> messages.HelloResponse:
    asked = frozenset(request.features)
    for feature in sorted(asked & FEATURE_NEEDS.keys()):
        if missing := FEATURE_NEEDS[feature] - asked:
            names = ", ".join(needed.name for needed in sorted(missing))
            raise RequestRefused(Status.EINVAL, f"{feature.name} needs {names} in the same HELLO")
    agreed = tuple(dict.fromkeys(sorted(feature for feature in request.features if feature in SERVED_FEATURES)))
    context.session.agent = request.key.decode(errors="replace")
    context.session.negotiated = Negotiated(frozenset(agreed))
    return messages.HelloResponse(opaque=request.opaque, features=agreed)


# --- log-in -------------------------------------------------------------------------------------------------------


def sasl_list(context: Context, request: messages.SaslListMechanisms) -> PlainResponse:
    offered = [mechanism for mechanism in Mechanism if mechanism is not Mechanism.PLAIN or context.session.allows_plain]
    return context.ok(" ".join(offered).encode())


def sasl_auth(context: Context, request: messages.SaslAuth) -> PlainResponse | None:
    session = context.session
    if session.dcp is not None or session.consumer is not None:
        raise RequestRefused(Status.EINVAL, "a DCP connection keeps its user: open another connection")
    session.log_out()
    # The selected bucket, and the commits that answers wait for, belonged to the previous user.
    session.flush()
    session.bucket = None
    try:
        mechanism = Mechanism.decode(request.key)
        if mechanism is Mechanism.PLAIN:
            login = PlainLogin.decode(request.value)
            if not context.session.allows_plain:
                raise RequestRefused(Status.AUTH_ERROR)
            attempt = LoginAttempt(peer=context.session.peer, user=login.user, password=login.password)
            _log_in(context, attempt, context.ok)
            return None
        nonce = encode_nonce(context.service.random_bytes(_NONCE_BYTES))
        session.scram = ScramServer(mechanism, context.service.users.credentials, nonce)
        challenge = session.scram.start(request.value)
    except (AuthenticationFailed, RemoteProtocolError, LocalProtocolError) as error:
        raise RequestRefused(Status.AUTH_ERROR) from error
    return context.ok(challenge, status=Status.AUTH_CONTINUE)


def sasl_step(context: Context, request: messages.SaslStep) -> None:
    scram, context.session.scram = context.session.scram, None
    if scram is None:
        raise RequestRefused(Status.AUTH_ERROR)
    signature = b""

    def prove() -> bool:
        nonlocal signature
        signature = scram.finish(request.value)
        return True

    attempt = LoginAttempt(peer=context.session.peer, user=scram.user, prove=prove)
    _log_in(context, attempt, lambda: context.ok(signature))


def _log_in(context: Context, attempt: LoginAttempt, welcome: Callable[[], PlainResponse]) -> None:
    """Queue the attempt to be checked. The connection handles nothing else until that is done."""
    service, session = context.service, context.session

    def conclude(verdict: LoginVerdict) -> PlainResponse:
        if verdict.outcome is LoginOutcome.RIGHT:
            session.user = attempt.user
            return welcome()
        if verdict.outcome is LoginOutcome.BUSY:
            raise RequestRefused(Status.ETMPFAIL, "too many log-ins at once: try again in a second")
        what = "failed" if verdict.outcome is LoginOutcome.WRONG else "refused: too many failures before it"
        message = f"log-in of {attempt.user!r} from {attempt.peer} {what}"
        service.log(message, event=LogEvent.LOGIN_FAILED, user=attempt.user, peer=attempt.peer)
        raise RequestRefused(Status.AUTH_ERROR)

    session.login = PendingLogin(context=context, attempt=attempt, conclude=conclude)


# --- bucket and config --------------------------------------------------------------------------------------------


def select_bucket(context: Context, request: messages.SelectBucket) -> PlainResponse:
    session = context.session
    session.flush()
    if not request.key:
        session.bucket = None
        return context.ok()
    name = request.key.decode(errors="replace")
    bucket = context.service.buckets.get(name)
    may_use = session.user is not None and context.service.users.may(session.user, Action.USE, name)
    if bucket is None or not may_use:
        # One answer for both, as in Couchbase: clients take any other as a sign that the config has not arrived yet.
        message = f"{session.user!r} from {session.peer} may not use bucket {name!r}, or it is not there"
        context.service.log(message, event=LogEvent.DENIED, user=session.user, peer=session.peer, bucket=name)
        raise RequestRefused(Status.EACCESS)
    session.bucket = bucket
    return context.ok()


def get_cluster_config(context: Context, request: messages.GetClusterConfig) -> PlainResponse:
    session = context.session
    if session.user is None:
        raise RequestRefused(Status.EACCESS)
    config = context.service.cluster_config(session.bucket.name if session.bucket else None)
    return context.ok(config, datatype=session.json_datatype)


def set_cluster_config(context: Context, request: messages.SetClusterConfig) -> PlainResponse:
    """Set the config that clients get from now on, in place of the node's own.

    It says which addresses are nodes, and how they log in to this one. So it needs a full admin, as kv_engine requires
    the right to supervise the node: a bucket admin could give itself access to all documents with it.
    """
    bucket = request.key.decode(errors="replace") or None
    if bucket is not None and bucket not in context.service.buckets:
        raise RequestRefused(Status.KEY_ENOENT)
    try:
        is_taken = context.service.set_cluster_config(bucket, (request.epoch, request.revision), request.value)
    except (MalformedJson, LocalProtocolError) as error:
        raise RequestRefused(Status.EINVAL, error.reason) from error
    if not is_taken:
        raise RequestRefused(Status.KEY_EEXISTS, "the config is not newer than the one there is")
    selected = context.session.bucket
    if selected is not None and selected.name == bucket:
        # A config that a coordinator has published is stored, and the answer confirms that.
        context.wait_for(selected.bucket.last_commit)
    return context.ok()


def get_error_map(context: Context, request: messages.GetErrorMap) -> PlainResponse:
    if request.version < 1:
        raise RequestRefused(Status.EINVAL, "error maps are numbered from 1")
    found = error_map(min(request.version, ERROR_MAP_VERSION))
    return context.ok(found, datatype=context.session.json_datatype)


# --- the rest -----------------------------------------------------------------------------------------------------


def noop(context: Context, request: messages.Noop | messages.Verbosity) -> PlainResponse:
    """Answer, and do nothing. `Verbosity` is accepted, too, although clients can't change how much the node logs."""
    return context.ok()


def version(context: Context, request: messages.Version) -> PlainResponse:
    return context.ok(context.service.server_version.encode())


def quit_connection(context: Context, request: messages.Quit) -> PlainResponse:
    context.session.is_quitting = True
    return context.ok()
