"""What errors of object storage mean: whether they pass, and how to mend them. No text here shows credentials."""

from __future__ import annotations

import os
import re
from enum import Enum

from harness.errors import FormatError
from harness.storage.uris import ObjectPath, redact


class Verdict(Enum):
    """What to do about an error."""

    PASSING = "try again"
    MISSING = "there is no such object"
    NO_BUCKET = "there is no such bucket"
    DENIED = "credentials or rights are wrong"
    REFUSED = "the request itself is refused"


# Names of errors as PyArrow and the three providers' libraries spell them.
_PATTERNS = (
    (Verdict.NO_BUCKET, r"NO_SUCH_BUCKET|NoSuchBucket|InvalidBucketName|ContainerNotFound|FilesystemNotFound"),
    (
        Verdict.DENIED,
        r"ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|INVALID_CLIENT_TOKEN_ID|UNRECOGNIZED_CLIENT"
        r"|EXPIRED_TOKEN|ExpiredToken|REQUEST_TIME_TOO_SKEWED|PERMISSION_DENIED|UNAUTHENTICATED|AuthenticationFailed"
        r"|AuthorizationFailure|AuthorizationPermissionMismatch|HTTP status 40[13]\b|\b40[13] [A-Z]"
        r"|DefaultAzureCredential|[Cc]ould not (automatically determine|create credentials)",
    ),
    (Verdict.MISSING, r"NO_SUCH_KEY|RESOURCE_NOT_FOUND|HTTP status 404\b|BlobNotFound"),
    (Verdict.REFUSED, r"HTTP status (30[1278]|400|405|409|411|412|416|501)\b|INVALID_ARGUMENT|MALFORMED"),
)
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to credentials with rights there",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
}
_AZURE_CREDENTIALS = "set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, or log in with Azure's own tools"


def judge(error: Exception) -> Verdict:
    """What an error of PyArrow's filesystems means; what is not known is tried again."""
    if isinstance(error, FileNotFoundError):
        return Verdict.MISSING
    if isinstance(error, PermissionError):
        return Verdict.DENIED
    for verdict, pattern in _PATTERNS:
        if re.search(pattern, str(error)):
            return verdict
    return Verdict.PASSING if isinstance(error, OSError) else Verdict.REFUSED


def explain(error: Exception, place: ObjectPath) -> FormatError:
    """An error that does not pass, for people."""
    text, verdict = str(error), judge(error)
    if verdict is Verdict.MISSING:
        return FormatError("no such object", where=str(place), fix="check the key; `/` parts folders")
    if verdict is Verdict.NO_BUCKET:
        return FormatError(
            f"no such bucket: {place.bucket}",
            where=str(place),
            fix="check the bucket's name, region and AWS_ENDPOINT_URL",
        )
    if verdict is Verdict.DENIED:
        credentials = _CREDENTIALS.get(place.scheme, _AZURE_CREDENTIALS)
        what = f"object storage denies access ({_short(text)})"
        if "INVALID_ACCESS_KEY_ID" in text:
            what = "object storage does not know the access key"
        elif "SIGNATURE_DOES_NOT_MATCH" in text:
            what = "object storage refuses the signature: the secret key, or this machine's clock, is wrong"
        return FormatError(what, where=str(place), fix=credentials)
    fix = "check AWS_ENDPOINT_URL and AWS_REGION" if place.scheme == "s3" else "check the address"
    if "411" in text:
        fix = "this store takes no upload checksums: set AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
    return FormatError(f"object storage refuses the request: {_short(text)}", where=str(place), fix=fix)


def unanswered(error: Exception, place: ObjectPath, *, attempts: int, seconds: float, setting: str) -> FormatError:
    """An error that could pass but did not in the time there is."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    is_s3 = place.scheme == "s3"
    named = f" at {redact(endpoint)}" if endpoint and is_s3 else ""
    return FormatError(
        f"object storage{named} did not answer: {attempts} attempts in {seconds:.1f} s, the last: {_short(str(error))}",
        where=str(place),
        fix=f"check the network{' and AWS_ENDPOINT_URL' if is_s3 else ''}; {setting} says how long to try",
    )


def _short(text: str) -> str:
    """The first line, without what only the store's own log can use."""
    line = redact(text.splitlines()[0] if text else "no reason given")
    line = re.sub(r"\s*\(Request ID: [^)]*\)", "", line)
    return line[:300]
