"""Addresses in object storage."""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import ConfigError

SCHEMES = ("s3", "gs", "abfs", "abfss", "az", "msc")
MISSING_OBJECT = "no such object"

_URI = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://([^/]*)/?(.*)", re.DOTALL)
_FIX = "set them in the environment (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...) or in the provider's own files"


def is_uri(path: str) -> bool:
    """Return whether a path has a scheme, such as `s3://`: as a local path it would silently be a folder `s3:`."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", path) is not None


@dataclass(frozen=True, slots=True)
class ObjectPath:
    """A place in object storage.

    Attributes:
        bucket: of s3 and gs; of abfs and az the container, with `@account...` after it if the URI names the account; of
            msc the profile.
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
            # Before an @ even text without a colon could be a key.
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
    """Return the path of a place from a folder: relative if both can be moved together, else the whole URI."""
    if isinstance(place, Path) and isinstance(base, Path):
        return Path(os.path.relpath(place.resolve(), base.resolve())).as_posix()
    if isinstance(place, Path):
        what = "data in object storage cannot refer to data on a disk"
        raise ConfigError(what, where=str(place), fix=f"copy it to {base}")
    if isinstance(base, Path) or (place.scheme, place.bucket) != (base.scheme, base.bucket):
        return str(place)
    return posixpath.relpath(f"/{place.key}", f"/{base.key}")


def resolve_path(base: Place, path: str) -> Place:
    """Return the place that `relative_path` gave as `path` from the folder `base`; raises ConfigError if malformed."""
    if is_uri(path):
        return ObjectPath.parse(path)
    if isinstance(base, Path):
        return Path(os.path.normpath(base.resolve() / path))
    return replace(base, key=posixpath.normpath(f"/{base.key}/{path}").strip("/"))


def join_path(path: str, name: str) -> str:
    return f"{path.rstrip('/')}/{name}" if is_uri(path) else os.path.join(path, name)  # noqa: PTH118
