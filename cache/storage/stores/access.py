"""Access: which servers remote addresses mean, and by whose rights they are read.

The process that trains decides both, by `storage_options=` or by its environment. It resolves them
into a `Grant` for each scheme, and sends these to the daemon with the manifest. A grant has

* the *options* of the store's client: endpoint, region, keys, headers;
* digests of the *environment* variables that decide the rest, because only the store's own library
  understands them (a profile, an instance's role, a key file). A daemon that has other values
  refuses to read (`differences`), and the training process reads by itself.

So a daemon never reads with the environment of another job. The identity of an `Access` is part of
the manifest's key: equal addresses with other servers or rights are other datasets.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from creel.errors import ConfigError, MalformedError, UnavailableError
from creel.messages import Grant, survives

#: `storage_options` of a dataset or a call, in fsspec's convention; None: the environment's.
Options: TypeAlias = Mapping[str, Any] | None

#: Schemes that pyarrow.fs reads and lists with its own clients.
ARROW = frozenset({"s3", "gs", "gcs", "hdfs", "viewfs", "az", "abfs", "abfss"})
AZURES = frozenset({"az", "abfs", "abfss"})

#: fsspec's names of options (s3fs, gcsfs), and pyarrow's.
_S3_NAMES = {
    "key": "access_key",
    "secret": "secret_key",
    "token": "session_token",
    "anon": "anonymous",
    "endpoint_url": "endpoint_override",
    "region_name": "region",
}
_GS_NAMES = {"anon": "anonymous", "endpoint_url": "endpoint_override", "project": "project_id"}

#: What Azure's connection strings call the options of an account.
_AZ_NAMES = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "SharedAccessSignature": "sas_token",
}
_AZ_VARIABLES = {
    "account_name": "AZURE_STORAGE_ACCOUNT_NAME",
    "account_key": "AZURE_STORAGE_ACCOUNT_KEY",
    "sas_token": "AZURE_STORAGE_SAS_TOKEN",
}

_AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_AWS_REGION = ("AWS_REGION", "AWS_DEFAULT_REGION")
_AWS_ENDPOINT = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
#: With keys at hand, the files that these name may still give an endpoint or a region.
_AWS_FILES = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_CONFIG_FILE", "HOME")
_AWS_SERVERS = ("AWS_USE_FIPS_ENDPOINT", "AWS_USE_DUALSTACK_ENDPOINT", "AWS_CA_BUNDLE")

_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_ANY_PROXY = (*_PROXIES, *(name.lower() for name in _PROXIES), "NETRC", "HOME")
_FOLDERS = ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
_GOOGLE = ("GOOGLE_", "CLOUDSDK_", "GCLOUD_", "GCE_", "GCS_", "CLOUD_STORAGE_", "STORAGE_EMULATOR_")
_AZURE = ("AZURE_", "MSI_", "IDENTITY_", "IMDS_")
_HADOOP = ("HADOOP_", "CLASSPATH", "JAVA_HOME", "ARROW_LIBHDFS_", "LIBHDFS_", "KRB5", "USER")
#: What libraries below fsspec read, by prefix; a scheme's own prefix is added.
_ANY_LIBRARY = (
    *_GOOGLE, *_AZURE, "AWS_", "HF_", "HUGGING", "OSS_", "OCI_", "DATABRICKS_", "LAKECTL_",
    "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
)  # fmt: skip
#: Schemes whose bytes are in the memory of one process.
_OF_ONE_PROCESS = frozenset({"memory"})


@dataclass
class StorageOptions:
    """The `storage_options` of a dataset, which the person may replace to renew credentials."""

    options: Options = None


@dataclass(frozen=True)
class Access:
    """How the remote addresses of some rows of a manifest are reached.

    Attributes:
        identity: equal where an address means the same and the same rights are used.
        schemes: of the addresses.
        given: the person's options; the process's environment decides what they leave open.
    """

    identity: str
    schemes: tuple[str, ...] = field(default=(), compare=False)
    given: StorageOptions = field(default_factory=StorageOptions, compare=False, repr=False)

    @classmethod
    def of(cls, schemes: Iterable[str], given: StorageOptions | None = None) -> Access:
        """Resolve the access of these schemes, without a request to any server.

        Raises:
            ConfigError: an option that no client of these schemes has.
        """
        given, ordered = given or StorageOptions(), tuple(sorted(set(schemes)))
        identities = [_identity(scheme, given.options) for scheme in ordered]
        return cls(_digest(repr(identities)), ordered, given)

    def options(self, scheme: str) -> dict[str, Any]:
        """Return the present options of a scheme's client in this process."""
        return options_of(scheme, self.given.options)

    def grants(self) -> dict[str, Grant]:
        """Return the present grant of each scheme, for a daemon.

        Raises:
            UnavailableError: no other process can read these addresses.
        """
        return {scheme: grant_of(scheme, self.given.options) for scheme in self.schemes}


def options_of(scheme: str, given: Options) -> dict[str, Any]:
    """Return the options of a scheme's client: the given ones, else those of the environment.

    For S3 and Google they have pyarrow's names; fsspec's are understood, too.

    >>> options_of("s3", {"key": "k", "secret": "s", "endpoint_url": "http://h:9", "region": "x"})
    {'access_key': 'k', 'secret_key': 's', 'endpoint_override': 'http://h:9', 'region': 'x'}

    Raises:
        ConfigError: not a mapping.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"storage_options is a dict of a client's options, not {type(given)}")
    options = dict(given or {})
    if scheme == "s3":
        options.update(options.pop("client_kwargs", {}))
        options = {_S3_NAMES.get(name, name): value for name, value in options.items()}
        return options | _s3_of_environment(options)
    if scheme in {"gs", "gcs"}:
        if options.get("token") == "anon":
            options["anonymous"] = bool(options.pop("token"))
        return {_GS_NAMES.get(name, name): value for name, value in options.items()}
    return _azures(scheme, options) if scheme in AZURES else options


def _azures(scheme: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return pyarrow's options for Azure of fsspec's (adlfs), and what the environment adds.

    >>> _azures("abfs", {"connection_string": "AccountName=a;AccountKey=k==", "anon": False})
    {'account_name': 'a', 'account_key': 'k=='}
    """
    env = os.environ
    string = options.pop("connection_string", None)
    if options.pop("anon", False):
        options["anonymous"] = True
    if scheme == "az":  # an address of abfs names its account
        string = string or env.get("AZURE_STORAGE_CONNECTION_STRING")
    for part in (string or "").split(";"):
        name, _, value = part.partition("=")
        if name in _AZ_NAMES:
            options.setdefault(_AZ_NAMES[name], value)
        elif name == "BlobEndpoint":
            options.update(_server_of(value))
    if scheme == "az":
        named = options.keys() & {"account_key", "sas_token", "client_id", "anonymous"}
        for name in ["account_name"] if named else _AZ_VARIABLES:
            if value := env.get(_AZ_VARIABLES[name]):
                options.setdefault(name, value)
    return options


def _server_of(endpoint: str) -> dict[str, str]:
    """Return pyarrow's options for the server of a connection string.

    >>> _server_of("http://127.0.0.1:10000/a")["blob_storage_authority"]
    '127.0.0.1:10000'
    """
    parts = urlsplit(endpoint)
    authority = parts.netloc if parts.path.strip("/") else "." + parts.netloc.partition(".")[2]
    names = ("authority", authority), ("scheme", parts.scheme)
    return {f"{kind}_storage_{name}": value for kind in ("blob", "dfs") for name, value in names}


def option_names(scheme: str) -> list[str]:
    """Return fsspec's names of a scheme's options, which docs/s3.md has; [] for others."""
    if scheme == "s3":
        return [*_S3_NAMES, "client_kwargs"]
    if scheme in AZURES:
        return ["anon", "connection_string"]
    return [*_GS_NAMES, "token"] if scheme in {"gs", "gcs"} else []


def _s3_of_environment(options: Mapping[str, Any]) -> dict[str, str]:
    """Return what the environment adds to the options of an S3 client."""
    account = {}
    env = os.environ
    if not options.keys() & {"access_key", "anonymous", "role_arn"} and env.get(_AWS_KEYS[0]):
        names = ("access_key", "secret_key", "session_token")
        pairs = zip(names, _AWS_KEYS, strict=True)
        account.update({name: env[variable] for name, variable in pairs if env.get(variable)})
    for name, variables in (("endpoint_override", _AWS_ENDPOINT), ("region", _AWS_REGION)):
        value = next((env[v] for v in variables if env.get(v)), None)
        if value is not None and name not in options:
            account[name] = value
    return account


def environment_of(scheme: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each variable of this process that decides what `options` leave open."""
    if scheme == "s3":
        names = _aws_variables(options)
    elif scheme in {"gs", "gcs"}:
        known = options.keys() & {"anonymous", "access_token"} and "endpoint_override" in options
        names = [] if known else [*_starting(_GOOGLE), "HOME"]
    elif scheme in AZURES:
        credentials = options.keys() & {"account_key", "sas_token", "anonymous"}
        names = [] if credentials else [*_starting(_AZURE), "HOME"]
    elif scheme in ARROW:
        names = [*_starting(_HADOOP), "HOME"]
    elif scheme in {"http", "https"}:
        names = [*_ANY_PROXY] if _trusts_environment(options) else []
    elif scheme in {"redis", "rediss"}:
        names = []
    else:
        own = tuple(part.upper() + "_" for part in _protocols(scheme))
        names = [*_starting((*_ANY_LIBRARY, *own)), *_ANY_PROXY, *_FOLDERS]
    wanted = sorted({*names, *_CERTIFICATES} & os.environ.keys())
    digests = {name: _digest(os.environ[name]) for name in wanted}
    if scheme not in ARROW:
        digests |= {f"the class of {p}://": _class_of(p) for p in _protocols(scheme)}
    return digests


def _aws_variables(options: Mapping[str, Any]) -> list[str]:
    handed: set[str] = set()
    if "endpoint_override" in options:
        handed.update((*_AWS_ENDPOINT, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"))
    if "region" in options:
        handed.update(_AWS_REGION)
    names = {*_starting(("AWS_",)), "HOME"}
    if options.keys() & {"access_key", "anonymous"}:  # the chain that looks for keys is not used
        servers = {*_AWS_SERVERS, *_AWS_REGION, *_AWS_ENDPOINT}
        servers |= set() if "endpoint_override" in options else {*_AWS_FILES}
        names &= servers
    return sorted(names - handed)


def _starting(prefixes: tuple[str, ...]) -> list[str]:
    return [name for name in os.environ if name.startswith(prefixes)]


def _trusts_environment(options: Mapping[str, Any]) -> bool:
    client = options.get("client_kwargs")
    return bool(isinstance(client, Mapping) and client.get("trust_env"))


def _protocols(scheme: str) -> list[str]:
    """Return the protocols of a chained address.

    >>> _protocols("simplecache::zip::s3"), _protocols("hf")
    (['simplecache', 'zip', 's3'], ['hf'])
    """
    return scheme.split("::")


def _class_of(protocol: str) -> str:
    """Return the name of the class that serves a protocol of fsspec in this process."""
    try:
        import fsspec

        kind = fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError):
        return ""
    return f"{kind.__module__}.{kind.__qualname__}"


def grant_of(scheme: str, given: Options) -> Grant:
    """Return what a daemon needs to read a scheme's addresses as this process does.

    Raises:
        UnavailableError: no other process can.
    """
    options = _resolved(scheme, given)
    if _OF_ONE_PROCESS & set(_protocols(scheme)):
        raise UnavailableError(f"{scheme}:// addresses are in the memory of one process")
    if not survives(options):
        raise UnavailableError(
            f"the options of {scheme}:// have values that cannot be sent to the daemon"
            " (only numbers, strings, lists and dicts can)"
        )
    return Grant(options, environment_of(scheme, options))


def _resolved(scheme: str, given: Options) -> dict[str, Any]:
    """Return the options of a scheme's client, with what fsspec.config has for it.

    fsspec itself adds that when it makes a client in this process.
    """
    options = options_of(scheme, given)
    if scheme in ARROW:
        return options
    try:
        import fsspec
    except ImportError:
        return options
    config, protocols = fsspec.config.conf, _protocols(scheme)
    if len(protocols) == 1:
        return {**config.get(scheme, {}), **options}
    chained = {p: {**config[p], **options.get(p, {})} for p in protocols if p in config}
    return {**options, **chained}


def differences(grants: Mapping[str, Grant]) -> list[str]:
    """Return what decides on these grants and is another in this process's environment."""
    names: set[str] = set()
    for scheme, grant in grants.items():
        theirs, ours = grant.environment, environment_of(scheme, grant.options)
        names.update(k for k in theirs.keys() | ours.keys() if theirs.get(k) != ours.get(k))
    return sorted(names)


def check_grants(grants: Sequence[Mapping[str, Grant]], accesses: int) -> None:
    """Check that this process, a daemon, can read with the grants of a manifest's accesses.

    Raises:
        UnavailableError: something else in the environment decides, and it is another one here.
        MalformedError: grants for another number of accesses.
    """
    if len(grants) != accesses:
        raise MalformedError(f"{len(grants)} grants for {accesses} accesses")
    names = sorted({name for grant in grants for name in differences(grant)})
    if names:
        schemes = sorted({f"{scheme}://" for grant in grants for scheme in grant})
        raise UnavailableError(
            f"the daemon has not this process's {', '.join(names)}, which decides how"
            f" {' and '.join(schemes)} addresses are read: choose another daemon.name, so that this"
            " job starts a daemon of its own"
        )


def shown(options: Mapping[str, Any]) -> str:
    """Say by which rights and from which server a client reads, without a secret.

    >>> shown({"access_key": "AKIA1", "secret_key": "x", "endpoint_override": "http://h:9"})
    'access key AKIA1 at http://h:9'
    """
    key, server = options.get("access_key"), options.get("endpoint_override")
    account = f"access key {key}" if key else "no account" if options.get("anonymous") else ""
    account = account or ("the given options" if options else "the environment's credentials")
    return f"{account} at {server}" if server else account


#: The access key that the environment had when a scheme was first resolved. Other ones later are
#: renewed credentials of the same job: its data stays cached.
_first_key: dict[str, str] = {}


def _identity(scheme: str, given: Options) -> str:
    options = _resolved(scheme, given)
    key = options.get("access_key")
    if key is not None and key not in (given or {}).values():
        options["access_key"] = _first_key.setdefault(scheme, str(key))
    for secret in ("secret_key", "session_token"):  # the key's id stands for them
        options.pop(secret, None)
    values = sorted((name, repr(value)) for name, value in options.items())
    decided = environment_of(scheme, options).items()
    # Where a container asks for its role: other in each, for the same role.
    return repr((scheme, values, [pair for pair in decided if "_CONTAINER_" not in pair[0]]))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=12).hexdigest()
