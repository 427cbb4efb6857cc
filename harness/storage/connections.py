"""Addresses in object storage, and storage clients: one per process and bucket, also after a fork.

S3, Google and Azure are accessed through `obstore`, which retries requests and resumes interrupted responses. Settings
come from the environment variables of the providers' own tools: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL (or the common
AWS_S3_ENDPOINT_URL, which AWS tools do not read), AWS_REGION, AWS_CA_BUNDLE, keys, web identities and instance roles;
AWS_PROFILE and the files of `aws configure` through boto3 (extra `s3`); Google's application default credentials;
AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN, a managed identity, or `az login`.
`msc://PROFILE/KEY` is accessed through NVIDIA's multi-storage-client (extra `msc`), configured by MSC_CONFIG.
HARNESS_STORAGE_TIMEOUT_S (default 60) limits one request, including all attempts.
"""

from __future__ import annotations

import importlib
import os
import posixpath
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from importlib.machinery import ExtensionFileLoader, PathFinder
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

from harness.errors import ConfigError

SCHEMES = ("s3", "gs", "abfs", "abfss", "az", "msc")
_URI = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://([^/]*)/?(.*)", re.DOTALL)
_FIX = "set them in the environment (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...) or in the provider's own files"
TIMEOUT_NAME = "HARNESS_STORAGE_TIMEOUT_S"
_TIMEOUT_S = 60.0
_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_", "MSC_", TIMEOUT_NAME)


def is_uri(path: str) -> bool:
    """Return True for a path with a scheme such as `s3://`; as a local path it would silently mean a folder `s3:`."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", path) is not None


@dataclass(frozen=True, slots=True)
class ObjectPath:
    """A place in object storage.

    Attributes:
        bucket: bucket for s3 and gs; container for abfs and az, followed by `@account...` if the URI names the account;
            profile for msc.
        key: without slashes at its ends; empty for the whole bucket.
    """

    scheme: str
    bucket: str
    key: str

    @classmethod
    def parse(cls, uri: str) -> ObjectPath:
        """Parse a URI; raises ConfigError for another scheme, no bucket, credentials, a query, or an invalid key."""
        match = _URI.fullmatch(uri)
        scheme, bucket, key = match.groups() if match is not None else ("", "", "")
        if scheme not in SCHEMES:
            known = ", ".join(f"{name}://" for name in SCHEMES)
            what = f"no object storage with the scheme {scheme[:20]!r}"
            raise ConfigError(what, where=uri, fix=f"use one of {known}")
        if re.search(r"\?[\w.-]+=", uri) or (("@" in bucket) if scheme in ("s3", "gs") else (":" in bucket)):
            # Text before an @ could be a key even without a colon.
            where = re.sub(r"://[^/@]*@", "://***@", uri)
            raise ConfigError("credentials and settings do not belong in a URI", where=where, fix=_FIX)
        key = key.strip("/")
        if not bucket or any(part in ("", ".", "..") for part in key.split("/") if key) or "\0" in key:
            raise ConfigError("not a complete address of an object", where=uri, fix=f"write {scheme}://BUCKET/KEY")
        return cls(scheme, bucket, key)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"

    def __truediv__(self, name: str) -> ObjectPath:
        return replace(self, key=f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        return replace(self, key=self.key.rpartition("/")[0])


Place = Path | ObjectPath


def relative_path(place: Place, base: Place) -> str:
    """Return the path of a place relative to a folder if both can be moved together, otherwise the full URI."""
    if isinstance(place, Path) and isinstance(base, Path):
        return Path(os.path.relpath(os.path.realpath(place), os.path.realpath(base))).as_posix()
    if isinstance(place, Path):
        what = "data in object storage cannot refer to data on a disk"
        raise ConfigError(what, where=str(place), fix=f"copy it to {base}")
    if isinstance(base, Path) or (place.scheme, place.bucket) != (base.scheme, base.bucket):
        return str(place)
    return posixpath.relpath(f"/{place.key}", f"/{base.key}")


def resolve_path(base: Place, path: str) -> Place:
    """Return the place of a `path` that `relative_path` returned for `base`; raises ConfigError if malformed."""
    if is_uri(path):
        return ObjectPath.parse(path)
    if isinstance(base, Path):
        return Path(os.path.normpath(base.resolve() / path))
    return replace(base, key=posixpath.normpath(f"/{base.key}/{path}").strip("/"))


def join_path(path: str, name: str) -> str:
    return f"{path.rstrip('/')}/{name}" if is_uri(path) else os.path.join(path, name)  # noqa: PTH118


# ---- clients


def connect(place: ObjectPath) -> Any:
    """Return the client for the bucket of a place: a store of `obstore`, or `MscStore`.

    ConfigError if settings are missing or malformed, or a package is not installed; OSError if the region of the bucket
    cannot be determined.
    """
    timeout_s()
    settings = tuple(sorted(one for one in os.environ.items() if one[0].startswith(_PREFIXES)))
    return _connect(os.getpid(), place.scheme, place.bucket, settings)


# Never cleared: a client whose threads were lost in a fork must not be destroyed.
@cache
def _connect(pid: int, scheme: str, bucket: str, settings: tuple[tuple[str, str], ...]) -> Any:
    if scheme == "msc":
        return MscStore(bucket)
    store = load_obstore().store
    if scheme == "gs":
        return store.GCSStore(bucket, **_limits(os.environ.get("GOOGLE_BASE_URL", "")))
    if scheme == "s3":
        return _connect_s3(store, bucket)
    container, _, host = bucket.partition("@")
    account = host.partition(".")[0] or os.environ.get("AZURE_STORAGE_ACCOUNT", "")
    if not account:
        fix = "set AZURE_STORAGE_ACCOUNT, or write abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/KEY"
        raise ConfigError(f"no storage account for the container {container}", where=f"{scheme}://{bucket}", fix=fix)
    given: dict[str, Any] = {"account_key": os.environ.get("AZURE_STORAGE_KEY")}
    known = ("KEY", "SAS_TOKEN", "ACCOUNT_KEY", "CLIENT_ID", "FEDERATED_TOKEN_FILE", "TOKEN")
    if not any(os.environ.get(f"AZURE_{kind}{name}") for kind in ("", "STORAGE_") for name in known):
        folder = Path(os.environ.get("AZURE_CONFIG_DIR") or "~/.azure").expanduser()
        given["use_azure_cli"] = shutil.which("az") is not None and (folder / "azureProfile.json").is_file()
    endpoint = os.environ.get("AZURE_STORAGE_ENDPOINT") or os.environ.get("AZURE_ENDPOINT") or ""
    given = {name: value for name, value in given.items() if value}
    return store.AzureStore(container, account_name=account, **given, **_limits(endpoint))


def _connect_s3(store: Any, bucket: str) -> Any:
    endpoint, region = s3_endpoint(), os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if "@" in endpoint:
        what = "credentials do not belong in AWS_ENDPOINT_URL"
        raise ConfigError(what, where="environment", fix="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    given: dict[str, Any] = {}
    if _has_aws_files():
        try:
            session = importlib.import_module("boto3").session.Session()
        except ImportError:
            profile = os.environ.get("AWS_PROFILE")
            raise ConfigError(
                f"credentials from {f'the profile {profile}' if profile else 'the files of `aws configure`'} need "
                "boto3, which is not installed",
                where="AWS_PROFILE" if profile else "~/.aws",
                fix="pip install 'megatron-sft-harness[s3]', or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            ) from None
        client = session.client("s3", region_name=region, endpoint_url=endpoint or None)
        if session.get_credentials() is not None:
            provider = importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider
            given["credential_provider"] = provider(session, ttl=timedelta(minutes=5))
        region = region or session.region_name
        endpoint = endpoint or (client.meta.endpoint_url if session.region_name else "")
    if endpoint:
        given["aws_endpoint_url_s3"] = endpoint if "://" in endpoint else f"https://{endpoint}"
    elif region is None:
        from pyarrow.fs import resolve_s3_region

        region = resolve_s3_region(bucket)
    limits = _limits(endpoint)
    if path := os.environ.get("AWS_CA_BUNDLE"):
        limits["client_options"]["root_certificate"] = Path(path).read_bytes()
    return store.S3Store(bucket, region=region or "us-east-1", **given, **limits)


def _limits(endpoint: str) -> dict[str, Any]:
    half = timedelta(seconds=timeout_s() / 2)
    return {
        "client_options": {"timeout": half, "connect_timeout": half / 3, "allow_http": endpoint.startswith("http://")},
        "retry_config": {
            "max_retries": 100,  # limited by time instead
            "retry_timeout": half,
            "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
        },
    }


def timeout_s() -> float:
    """Return the time limit of one request in seconds; raises ConfigError for an invalid environment variable."""
    text = os.environ.get(TIMEOUT_NAME, "")
    try:
        value = float(text) if text else _TIMEOUT_S
    except ValueError:
        value = 0.0
    if not 0.5 <= value <= 3600:
        raise ConfigError(f"{TIMEOUT_NAME} is {text!r}", where="environment", fix="use seconds from 0.5 to 3600")
    return value


def s3_endpoint() -> str:
    """Return the S3 endpoint set in the environment, without a trailing `/`; empty for AWS."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_S3_ENDPOINT_URL")
    return next((value.rstrip("/") for name in names if (value := os.environ.get(name))), "")


def _has_aws_files() -> bool:
    """Return True if credentials come from a profile or from the files of `aws configure`."""
    if os.environ.get("AWS_PROFILE"):
        return True
    if os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_SKIP_SIGNATURE"):
        return False
    files = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
    return any(Path(os.environ.get(name) or path).expanduser().is_file() for name, path in files.items())


def load_obstore() -> Any:
    """Return the package `obstore`, with threads that belong to this process."""
    return _load_obstore(os.getpid())


@cache
def _first_pid() -> int:
    return os.getpid()


@cache
def _load_obstore(pid: int) -> Any:
    """Import the package; in a process forked from one that imported it, import another copy.

    Its threads do not survive a fork, and it starts them only once, so every later request would wait forever, even
    with a new client. A second copy of the library has its own threads. The dynamic loader would reuse a library of
    the same name or file, so the copy is in memory, under a name that no ancestor has used.
    """
    if pid == _first_pid():
        return importlib.import_module("obstore")
    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"]:
        del sys.modules[name]  # objects of the ancestor keep their copy
    library = "obstore._obstore"
    package = PathFinder.find_spec("obstore")
    found = PathFinder.find_spec(library, package.submodule_search_locations) if package is not None else None
    assert found is not None
    assert found.origin is not None
    memory = os.memfd_create("obstore")
    with os.fdopen(memory, "wb", closefd=False) as file:
        file.write(Path(found.origin).read_bytes())
    loader = ExtensionFileLoader(library, f"/proc/{pid}/fd/{memory}")
    spec = spec_from_loader(library, loader)
    assert spec is not None
    sys.modules[library] = module_from_spec(spec)
    loader.exec_module(sys.modules[library])
    return importlib.import_module("obstore")


class MscStore:
    """A profile of multi-storage-client with the `obstore` methods used here."""

    def __init__(self, profile: str) -> None:
        try:
            from multistorageclient import StorageClient, StorageClientConfig
            from multistorageclient.types import Range
        except ImportError:
            what = "msc:// requires NVIDIA's multi-storage-client, which is not installed"
            fix = "pip install 'megatron-sft-harness[msc]', and set MSC_CONFIG to its settings"
            raise ConfigError(what, where=f"msc://{profile}", fix=fix) from None
        self._client = StorageClient(StorageClientConfig.from_file(None, profile))
        self._range, self.delete = Range, self._client.delete

    def head(self, key: str) -> dict[str, Any]:
        found = self._client.info(key, strict=False)
        if found.type != "file":
            raise FileNotFoundError(key)
        return _described(found)

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        return bytes(self._client.read(key, byte_range=self._range(start, length)))

    def list(self, prefix: str) -> Iterator[list[dict[str, Any]]]:
        yield [_described(one) for one in self._client.list(path=prefix) if one.type == "file"]

    def open_writer(self, key: str) -> MscWriter:
        return MscWriter(self._client, key)


class MscWriter:
    """An upload through a temporary file; the object exists after `close`."""

    def __init__(self, client: Any, key: str) -> None:
        self._client, self._key = client, key
        self._file = tempfile.NamedTemporaryFile(prefix="harness-upload-")  # noqa: SIM115 - closed by both ends
        self.write = self._file.write

    def close(self) -> None:
        self._file.flush()
        self._client.upload_file(self._key, self._file.name)
        self._file.close()

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _described(found: Any) -> dict[str, Any]:
    return {"path": found.key, "size": found.content_length, "e_tag": found.etag, "last_modified": found.last_modified}
