"""Where a lake lies, and how files are read and written there: a directory, or a prefix in an object store.

`Location.of` is the only code that parses a lake's address from the user, and every module of the lake reads and writes
through a location. Tasks carry it to executors, with the options of its store; its `repr` shows none of them, for some
are secrets.

Object stores are accessed with obstore. delta-rs contains the same library, so that the logs, which delta-rs writes,
and the files, which this module writes, take the same options, find the same credentials in the environment and retry
by the same rules. A file appears in a store only when it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from pyarrow import fs

from headwater.durable_files import create_file, replace_file, sync_folder
from headwater.errors import HeadwaterError, InvalidInput, LakeError, LakeFull, LakeGone, LakeUnreachable, QueryFailed
from headwater.options import parse_interval_s
from headwater.phrases import printable

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_STORES = {
    "s3": "AWS_",
    "s3a": "AWS_",
    "gs": "GOOGLE_",
    "az": "AZURE_",
    "abfs": "AZURE_",
    "abfss": "AZURE_",
}
"""The schemes of object stores, and the prefixes of their environment variables."""
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):(?=/)")
_UNUSABLE = re.compile(r"%[0-9A-Fa-f]{2}|[\\\[\]|^\x00-\x1f\x7f]")
_UNUSABLE_IN_STORES = re.compile(r"%25[0-9A-Fa-f]{2}|[#?\\\[\]|^\x00-\x1f\x7f]")
"""Characters for which delta-rs looks in another place than Arrow and obstore, or panics."""
_CLIENT_OPTIONS = frozenset(
    {"allow_http", "allow_invalid_certificates", "connect_timeout", "timeout", "proxy_url", "proxy_ca_certificate",
     "proxy_excludes", "user_agent", "root_certificate"}
)  # fmt: skip
_RETRY_OPTIONS = frozenset({"max_retries", "retry_timeout"})
_TIME = (r"[0-9]+(ms|s|m|h)", "a time like 30s or 500ms")
_SWITCH = ("true|false", "true or false")
_VALUES = {
    "timeout": _TIME,
    "connect_timeout": _TIME,
    "retry_timeout": _TIME,
    "max_retries": (r"[0-9]{1,6}", "a whole number"),
    "allow_http": _SWITCH,
    "allow_invalid_certificates": _SWITCH,
}
"""Options whose values are parsed here or in the HTTP client: their pattern, and its description."""
_DELTA_OPTIONS = frozenset({"aws_s3_allow_unsafe_rename", "allow_unsafe_rename"})
"""For delta-rs alone."""
_KNOWN_OPTIONS = {
    "AWS_": (
        *("access_key_id", "secret_access_key", "session_token", "region", "default_region", "endpoint"),
        *("endpoint_url", "allow_http", "virtual_hosted_style_request", "skip_signature", "server_side_encryption"),
        *("sse_kms_key_id", "conditional_put", "unsigned_payload", "imdsv1_fallback"),
    ),
    "AZURE_": (
        *("storage_account_name", "storage_account_key", "storage_sas_token", "storage_client_id"),
        *("storage_client_secret", "storage_tenant_id", "client_id", "client_secret", "tenant_id"),
        *("storage_endpoint", "storage_use_emulator", "allow_http"),
    ),
    "GOOGLE_": ("service_account", "service_account_key", "application_credentials"),
}
"""The options in common use, without their prefixes. As environment variables they are upper case."""
OWN_FOLDER = "_headwater"
"""Beside the tables: notes for people (`lake_look`). Earlier versions kept the selection in it."""
_PROBE_RETRIES = {"max_retries": "2", "retry_timeout": "10s"}
"""For the first access to a store: a user waits for it."""


class Output(Protocol):
    """A file that is being written. It exists only once it is closed."""

    def write(self, data: bytes) -> Any: ...

    def tell(self) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or a folder, by its name in the listed folder."""

    name: str
    changed_at: datetime | None = None
    """None for a folder."""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Location:
    """A folder of a lake, or the lake itself: an absolute path, or the URI of a prefix in an object store."""

    uri: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Of the object store, with the names of delta-rs and obstore: `aws_access_key_id`, `endpoint`, `timeout`, …"""
    lake_uri: str | None = field(default=None, compare=False, repr=False)
    """For a folder in a lake: where that lake lies."""

    @classmethod
    def of(cls, text: str | Self, options: Mapping[str, str] | None = None) -> Self:
        """Parse a location given by a user. Raises `InvalidInput` if it can't be used."""
        location = text if not isinstance(text, str) else cls._of_text(text, options)
        unusable = (_UNUSABLE if location.is_local else _UNUSABLE_IN_STORES).search(location.uri)
        if unusable is not None:
            raise InvalidInput(
                f"tables can't be in {location.uri!r}: delta-rs does not open a path with {unusable[0]!r}",
                hint="Give a path without it; letters of any language, spaces and -_.,~+ are fine",
            )
        return location

    @classmethod
    def _of_text(cls, text: str, options: Mapping[str, str] | None) -> Self:
        match = _SCHEME.match(text)
        scheme = match[1].lower() if match else "file"
        if scheme in _STORES:
            given = _checked(scheme, options or {})
            return cls(f"{scheme}:{text[len(scheme) + 1 :].rstrip('/')}", {**_environment_options(scheme), **given})
        if options:
            raise InvalidInput(f"{text} is not an object store and takes no options", hint="Omit the storage options")
        if match is None:
            # Spark processes work in the directory in which the session was started.
            return cls(os.path.abspath(text))
        if scheme == "dbfs" and Path("/dbfs").is_dir():
            return cls("/dbfs/" + text[len("dbfs:") :].strip("/"))
        if scheme != "file":
            known = ", ".join(f"{name}://" for name in _STORES)
            raise InvalidInput(f"{scheme}: is not a supported store for tables", hint=f"Give a directory, or {known}")
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise InvalidInput(f"{text} is on another host", hint="Write file:///path for a directory of this machine")
        return cls(unquote(parts.path).rstrip("/") or "/")

    def join(self, *names: str) -> Self:
        """Return a folder in this one."""
        return type(self)("/".join((self.uri.rstrip("/"), *names)), self.options, self.lake_uri or self.uri)

    @property
    def is_local(self) -> bool:
        return _SCHEME.match(self.uri) is None

    @property
    def full_uri(self) -> str:
        """The URI with its scheme, as engines in other languages and catalogs expect it."""
        return f"file://{self.uri}" if self.is_local else self.uri

    @property
    def delta_options(self) -> dict[str, str] | None:
        """The options for delta-rs."""
        return dict(self.options) or None

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, path: str) -> bytes:
        """Return a whole file. Raises `FileNotFoundError` if there is none."""
        if self.is_local:
            return Path(self.uri, path).read_bytes()
        import obstore

        with self.answering():
            return bytes(obstore.get(self._store(), path).bytes())

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return ranges of a file, each given by start and end. Raises `FileNotFoundError` if there is no such file."""
        if self.is_local:
            with open(f"{self.uri}/{path}", "rb") as file:
                return [os.pread(file.fileno(), end - start, start) for start, end in ranges]
        import obstore

        starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
        with self.answering():
            # Ranges that are close to each other become one request.
            return [bytes(part) for part in obstore.get_ranges(self._store(), path, starts=starts, ends=ends)]

    def open_input(self, path: str) -> pa.NativeFile:
        """Open a file for reading parts of it."""
        if self.is_local:
            return fs.LocalFileSystem().open_input_file(f"{self.uri}/{path}")
        return pa.PythonFile(_StoredInput(self._store(), path), mode="r")

    def entries(self, folder: str = "") -> list[Entry]:
        """Return the files and folders in a folder, sorted by name; none if the folder does not exist."""
        if self.is_local:
            found = fs.LocalFileSystem().get_file_info(
                fs.FileSelector(f"{self.uri}/{folder}".rstrip("/") or "/", allow_not_found=True)
            )
            made = [
                Entry(one.base_name, one.mtime, one.size) if one.type == fs.FileType.File else Entry(one.base_name)
                for one in found
            ]
        else:
            with self.answering():
                listed = self._store().list_with_delimiter(folder or None)
            made = [
                Entry(one["path"].rpartition("/")[2], one["last_modified"], one["size"]) for one in listed["objects"]
            ]
            made += [Entry(one.rstrip("/").rpartition("/")[2]) for one in listed["common_prefixes"]]
        return sorted(made, key=lambda entry: entry.name)

    def identity(self) -> tuple[int, int] | None:
        """Return an identity of this directory that another one in its place would not have; None in an object store.
        Raises `LakeGone` if the directory does not exist."""
        if not self.is_local:
            return None
        try:
            found = os.stat(self.uri)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self.gone() from error
        return found.st_dev, found.st_ino

    def gone(self) -> LakeGone:
        """Return the error for a lake that is no longer at its place."""
        return LakeGone(
            f"the tables in {self.lake_uri or self.uri} were moved, removed or replaced while they were in use",
            hint="Restore them, or give their new directory, then start again: nothing is lost",
        )

    # --- writing ------------------------------------------------------------------------------------------------------

    def open_output(self, path: str) -> Output:
        """Open a new file. Creates its folders, but only in an existing lake."""
        if self.is_local:
            self._make_folder_of(path)
            if (outputs := _OUTPUTS.get()) is not None:
                outputs.append(f"{self.uri}/{path}")
            stream: Output = fs.LocalFileSystem().open_output_stream(f"{self.uri}/{path}")
            return stream
        return _StoredOutput(self._store(), path)

    def make(self) -> None:
        """Create the directory if it is missing. An object store has none."""
        if self.is_local:
            Path(self.uri).mkdir(parents=True, exist_ok=True)

    def write(self, path: str, data: bytes) -> None:
        """Write a whole file, replacing an existing one. The lake must exist."""
        if self.is_local:
            with self.answering():
                self._make_folder_of(path)
                replace_file(Path(self.uri, path), data)
        else:
            import obstore

            with self.answering():
                obstore.put(self._store(), path, data)

    def create(self, path: str, data: bytes) -> None:
        """Write a new file. Raises `FileExistsError` if it exists already: of several writers only one succeeds."""
        with self.answering():
            if self.is_local:
                create_file(Path(self.uri, path), data)
                return
            import obstore
            from obstore.exceptions import AlreadyExistsError

            try:
                obstore.put(self._store(), path, data, mode="create")
            except AlreadyExistsError as error:
                raise FileExistsError(path) from error

    def delete(self, paths: Sequence[str]) -> None:
        """Delete files. Ignores missing ones."""
        if self.is_local:
            with self.answering():
                for path in paths:
                    Path(self.uri, path).unlink(missing_ok=True)
        elif paths:
            import obstore

            with self.answering(), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store(), [*paths])

    def check(self) -> None:
        """Raise `LakeError`, with one sentence, if an object store does not permit reads, writes and exclusive creates.

        Leaves nothing behind. For a directory, creating it shows whether it can be written.
        """
        if self.is_local:
            return
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError

        probe = f"{OWN_FOLDER}/probe-{uuid.uuid4().hex}"
        try:
            store = _open_store(self.uri, tuple(sorted({**self.options, **_PROBE_RETRIES}.items())))
            store.list_with_delimiter(None)
            obstore.put(store, probe, b"", mode="create")
            try:
                obstore.put(store, probe, b"", mode="create")
                is_exclusive = False
            except AlreadyExistsError:
                is_exclusive = True
            # delta-rs looks for new log entries this way.
            is_listed_from = probe in _paths_after(store, OWN_FOLDER) and probe not in _paths_after(store, f"{probe}~")
            obstore.delete(store, probe)
        except (BaseError, OSError) as error:
            reason, hint = _cause(error)
            raise LakeError(f"{self.uri} can't be used: {reason}", hint=hint) from None
        if not is_exclusive:
            raise LakeError(
                f"{self.uri} can't be used: without conditional puts, two writers could overwrite each other",
                hint="Use a store that supports If-None-Match, such as S3 itself or a newer version of this one",
            )
        if not is_listed_from:
            raise LakeError(
                f"{self.uri} can't be used: it ignores the start of a listing",
                hint="Azure's emulator needs --storage-option azure_storage_use_emulator=true",
            )

    def _make_folder_of(self, path: str) -> None:
        if not Path(self.lake_uri or self.uri).is_dir():
            raise self.gone()
        folder = Path(self.uri, path).parent
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(folder.parent)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Raise `LakeUnreachable` if the store fails inside, and `LakeFull` or `LakeError` if the disk does: in one
        sentence, with the cause."""
        try:
            yield
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:
            found = _disk_error(error, self.uri) if self.is_local else _store_error(error, self.uri)
            if found is None:
                raise
            raise found from error

    def _store(self) -> ObjectStore:
        return _open_store(self.uri, tuple(sorted(self.options.items())))


_OUTPUTS: ContextVar[list[str] | None] = ContextVar("outputs", default=None)


@contextmanager
def noting_outputs() -> Iterator[list[str]]:
    """Yield a list that collects the paths of local files opened for writing inside, in order."""
    outputs: list[str] = []
    token = _OUTPUTS.set(outputs)
    try:
        yield outputs
    finally:
        _OUTPUTS.reset(token)


# --- object stores ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _open_store(uri: str, options: tuple[tuple[str, str], ...]) -> ObjectStore:
    """Open the prefix of a store. One client serves all threads of a process."""
    from obstore.store import from_url

    config: dict[str, Any] = {}
    client: dict[str, Any] = {}
    retries: dict[str, Any] = {}
    for name, value in options:
        plain = _without_prefix(name)
        if plain in _CLIENT_OPTIONS:
            client[plain] = value == "true" if plain.startswith("allow_") else value
        elif plain == "max_retries":
            retries[plain] = int(value)
        elif plain == "retry_timeout":
            retries[plain] = timedelta(seconds=parse_interval_s(value))
        elif plain not in _DELTA_OPTIONS:
            config[plain] = value
    return from_url(uri, config=config, client_options=client or None, retry_config=retries or None)  # type: ignore[call-overload, no-any-return]


def _paths_after(store: ObjectStore, offset: str) -> list[str]:
    """Return the files of our own folder whose paths come after `offset`."""
    return [entry["path"] for entries in store.list(OWN_FOLDER, offset=offset) for entry in entries]


_TAIL_BYTES = 256 * 1024


class _StoredInput:
    """An object as a file for reading parts.

    The first request returns its size and its last bytes: the footer of a Parquet file, or all of a small file. Each
    other part is one more request: Arrow asks for few and large ones.
    """

    def __init__(self, store: ObjectStore, path: str) -> None:
        import obstore
        from obstore.exceptions import GenericError, NotSupportedError

        self._store, self._path = store, path
        try:
            found = obstore.get(store, path, options={"range": {"suffix": _TAIL_BYTES}})
            self._size, self._tail = int(found.meta["size"]), bytes(found.bytes())
        except (NotSupportedError, GenericError) as error:
            # Azure has no suffix ranges, and an empty object has no part.
            if isinstance(error, GenericError) and "NotPartial" not in str(error):
                raise
            self._size, self._tail = int(obstore.head(store, path)["size"]), b""
        self._at = 0
        self.closed = False

    def read(self, length: int | None = None) -> bytes:
        import obstore

        length = self._size - self._at if length is None or length < 0 else min(length, self._size - self._at)
        if length <= 0:
            return b""
        in_tail = self._at - (self._size - len(self._tail))
        if in_tail >= 0:
            data = self._tail[in_tail : in_tail + length]
        else:
            data = bytes(obstore.get_range(self._store, self._path, start=self._at, length=length))
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


class _StoredOutput:
    """An object that is uploaded in parts while it is written. It exists once it is closed."""

    def __init__(self, store: ObjectStore, path: str) -> None:
        import obstore

        self._writer = obstore.open_writer(store, path)
        self._at = 0

    def write(self, data: bytes) -> int:
        self._writer.write(data)
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self._writer.close()


# --- options of stores ------------------------------------------------------------------------------------------------


def _environment_options(scheme: str) -> dict[str, str]:
    """Return the environment's options for the store, to send to executors, whose environment differs."""
    prefix = _STORES[scheme]
    names = [prefix + name.upper() for name in _KNOWN_OPTIONS[prefix]]
    return {name.lower(): value for name in names if (value := os.environ.get(name))}


def _without_prefix(name: str) -> str:
    """Return obstore's name of an HTTP client option. delta-rs also accepts names such as `aws_allow_http`."""
    plain = name.partition("_")[2] if name.startswith(("aws_", "azure_", "google_")) else name
    return plain if plain in _CLIENT_OPTIONS else name


def _checked(scheme: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return the user's options with lower-case names. Raises `InvalidInput` for names that the store does not know."""
    from obstore.exceptions import BaseError

    checked = {name.lower(): str(value) for name, value in options.items()}
    for name, value in checked.items():
        plain = _without_prefix(name)
        if plain in _VALUES and not re.fullmatch(_VALUES[plain][0], value):
            raise InvalidInput(f"{value!r} is not a valid value of {name}", hint=f"Write {_VALUES[plain][1]}")
        if plain in _CLIENT_OPTIONS | _RETRY_OPTIONS | _DELTA_OPTIONS:
            continue
        try:
            _open_store(f"{scheme}://bucket/", ((name, value),))
        except BaseError as error:
            if "onfiguration key" in str(error):
                prefix = _STORES[scheme]
                known = [prefix.lower() + one for one in _KNOWN_OPTIONS[prefix]]
                near = get_close_matches(name, [*known, *_CLIENT_OPTIONS, *_RETRY_OPTIONS], n=1)
                hint = f"Did you mean {near[0]}?" if near else "See delta-rs' page on storage options for the names"
                raise InvalidInput(f"{name} is not an option of {scheme}:// stores", hint=hint) from None
    return checked


# --- errors -----------------------------------------------------------------------------------------------------------

_CODE = re.compile(r"<Code>(\w+)</Code>")
_CHECK_ENDPOINT = "Check the endpoint and the network"
_CAUSES = (
    # Pattern of the error's text, its meaning, and what to do.
    (
        r"NoSuchBucket|ContainerNotFound|The specified bucket does not exist",
        "there is no such bucket",
        "Make it, or correct its name",
    ),
    (
        r"InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|ExpiredToken|AuthenticationFailed|401 Unauthorized",
        "the credentials are not valid",
        "Check them: storage options, or the variables of the environment",
    ),
    (
        r"Account must be specified",
        "no storage account is named",
        "Write abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/…, or give azure_storage_account_name",
    ),
    (
        r"Invalid Access Key|Missing (SecretAccessKey|AccessKeyId)|service account file",
        "the credentials can't be read",
        "Check the keys, and the files that are named",
    ),
    (
        r"AuthorizationHeaderMalformed|PermanentRedirect|301 Moved|IllegalLocationConstraint",
        "the bucket is in another region",
        "Give its region: --storage-option aws_region=NAME",
    ),
    (
        r"AccessDenied|403 Forbidden|AuthorizationPermissionMismatch|AuthorizationFailure",
        "access is denied",
        "Ask for the right to list, read, write and delete there",
    ),
    (r"SlowDown|503 Service|429 Too", "the store asks to slow down", "Try again later, or less often"),
    (r"[Cc]onnection refused", "the store does not answer (connection refused)", _CHECK_ENDPOINT),
    (r"dns error|failed to lookup address", "the store's host name is unknown", _CHECK_ENDPOINT),
    (r"timed out|deadline has elapsed", "the store does not answer in time", _CHECK_ENDPOINT),
    (
        r"169\.254\.169\.254|instance metadata|metadata\.google",
        "no credentials were found",
        "Give them as storage options, or by the environment",
    ),
    (
        r"builder error|URL scheme is not allowed",
        "the endpoint is plain HTTP",
        "Add --storage-option allow_http=true, if that is meant",
    ),
)
_CAUSE_CHARS_MAX = 500
_OF_STORE = re.compile(r"Generic (S3|GCS|\w*Azure\w*) error|Error performing (GET|PUT|HEAD|POST|DELETE|list)")


def _store_error(error: Exception, uri: str) -> LakeUnreachable | None:
    """Convert an error of the store; return None for any other. delta-rs has no class for these."""
    if not type(error).__module__.startswith("obstore") and not _OF_STORE.search(str(error)):
        return None
    reason, hint = _cause(error)
    return LakeUnreachable(f"{uri} can't be reached: {reason}", hint=hint)


_GOES_ON = "Free space there: the landing resumes by itself, and nothing is lost"
_MAY_WRITE = "Let the user of this process read and write there, then start again: nothing is lost"
_DISK_ERRORS: Mapping[int, tuple[type[LakeError], str, str]] = {
    errno.ENOSPC: (LakeFull, "the disk of {} is full", _GOES_ON),
    errno.EDQUOT: (LakeFull, "the disk quota of {} is used up", _GOES_ON),
    errno.EROFS: (
        LakeError,
        "{} can't be written: its file system is read-only",
        "Mount it for writing, then start again: nothing is lost",
    ),
    errno.EACCES: (LakeError, "{} can't be used: permission denied", _MAY_WRITE),
    errno.EPERM: (LakeError, "{} can't be used: permission denied", _MAY_WRITE),
    errno.EIO: (
        LakeError,
        "{} can't be used: its disk fails (input/output error)",
        "See the system's log and check the disk, then start again",
    ),
    errno.ENAMETOOLONG: (
        LakeError,
        "{} can't be written: a name is too long for its file system",
        "Give a directory with a shorter path",
    ),
    errno.EMFILE: (
        LakeError,
        "{} can't be used: the process has too many open files",
        "Raise the limit (ulimit -n), then start again: nothing is lost",
    ),
}
_OS_ERROR = re.compile(r"\(os error (\d+)\)|\[[Ee]rrno (\d+)\]")
"""How Rust and Arrow include the number of a system error in their texts."""


def system_error(error: BaseException) -> int:
    """Return the number of a system error, whichever library reports it; 0 for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (match := _OS_ERROR.search(str(error))):
        number = int(match[1] or match[2])
    return number or 0


def _disk_error(error: BaseException, where: str) -> LakeError | None:
    """Convert an error of the disk; return None for any other."""
    if (found := _DISK_ERRORS.get(system_error(error))) is None:
        return None
    kind, reason, hint = found
    return kind(reason.format(where), hint=hint)


def lake_error(error: Exception, where: str) -> HeadwaterError:
    """Convert any error of work on tables to one of ours: a sentence with its cause. `where` is the place to name if
    the error names none itself."""
    if isinstance(error, HeadwaterError):
        return error
    place = error.filename if isinstance(error, OSError) and isinstance(error.filename, str) else where
    found = _disk_error(error, place) or _store_error(error, where)
    if found is not None:
        return found
    if isinstance(error, MemoryError):
        return QueryFailed(
            "a task has run out of memory",
            hint="Run fewer tasks at a time, such as with --master local[1], or give the machine more memory",
        )
    cause = printable(" ".join(str(error).split()))[:_CAUSE_CHARS_MAX]
    return QueryFailed(f"work on {where} failed: {type(error).__name__}: {cause}", hint="See Spark's log for details")


def _cause(error: BaseException) -> tuple[str, str]:
    text = str(error)
    for pattern, reason, hint in _CAUSES:
        if re.search(pattern, text):
            return reason, hint
    code = _CODE.search(text)
    first = code[1] if code else printable(text.splitlines()[0] if text else type(error).__name__)[:200]
    return f"it answers {first}", "Check the address, the credentials and the store itself"
