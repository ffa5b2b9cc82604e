"""The package index that the user's pip is configured with."""

from __future__ import annotations

import configparser
import functools
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import requests
import urllib3
from pypi_simple import (
    PYPI_SIMPLE_ENDPOINT,
    DistributionPackage,
    Link,
    NoSuchProjectError,
    PyPISimple,
    RepositoryPage,
)
from requests.adapters import BaseAdapter, HTTPAdapter
from requests.auth import AuthBase, HTTPBasicAuth
from requests.structures import CaseInsensitiveDict
from requests.utils import get_auth_from_url, get_netrc_auth

from pybuild.errors import BuildError, PybuildError

REMEDY = "The index is the one that pip uses: see `pip config list`, PIP_INDEX_URL and PIP_EXTRA_INDEX_URL."

ETC = Path("/etc")


@dataclass(frozen=True)
class PipConfig:
    """What pip's settings say about where files come from, and how to reach it."""

    index_urls: tuple[str, ...]
    find_links: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    cert: str | None = None
    client_cert: str | None = None
    proxy: str | None = None
    timeout: float = 15.0
    """Seconds without a byte before a connection is given up; 15 is pip's own default."""


def config_files(environ: Mapping[str, str]) -> list[Path]:
    """pip.conf's possible places on Linux, in pip's order: a later one wins.

    The order is that of pip's `Configuration`: global, user, virtual environment, PIP_CONFIG_FILE. As with
    pip, a PIP_CONFIG_FILE that exists shuts out the user's files, and /dev/null all of them.
    """
    named = environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    home = Path(environ.get("HOME") or Path.home())
    files = [Path(d, "pip/pip.conf") for d in (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":") if d]
    files.append(ETC / "pip.conf")
    if not (named and Path(named).exists()):
        files += [
            home / ".pip/pip.conf",
            Path(environ.get("XDG_CONFIG_HOME") or home / ".config", "pip/pip.conf"),
        ]
    # An active environment's pip is the user's pip, even where pybuild itself is installed elsewhere (pipx).
    files.append(Path(environ.get("VIRTUAL_ENV") or sys.prefix, "pip.conf"))
    return [*files, Path(named)] if named else files


def pip_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings that `pip install` would run with: option names with dashes, and their text.

    [install] wins over [global], and PIP_* over both, wherever they are; empty values don't count.
    """
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, "environment": {}}
    for file in config_files(environ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise PybuildError(f"{file}: not a pip configuration: {error}", "pip can't read it either.") from error
        for section in ("global", "install"):
            if parser.has_section(section):
                sections[section].update((_option(key), value) for key, value in parser.items(section))
    for key, value in environ.items():
        if key.startswith("PIP_"):
            sections["environment"][_option(key[4:])] = value
    return {key: value for section in sections.values() for key, value in section.items() if value.strip()}


def read_pip_config(environ: Mapping[str, str]) -> PipConfig:
    """What pip's files and `environ` say. Raises PybuildError for a value that pip would refuse."""
    settings = pip_settings(environ)
    indexes = [settings.get("index-url", PYPI_SIMPLE_ENDPOINT), *settings.get("extra-index-url", "").split()]
    timeout = settings.get("timeout", "15")
    try:
        seconds = float(timeout)
        if not seconds > 0:
            raise ValueError
    except ValueError:
        raise PybuildError(f"pip's setting timeout = {timeout!r} is not a number of seconds", REMEDY) from None
    return PipConfig(
        index_urls=() if _flag("no-index", settings) else tuple(dict.fromkeys(_as_url(i.strip()) for i in indexes)),
        find_links=tuple(_as_url(link) for link in settings.get("find-links", "").split()),
        trusted_hosts=tuple(settings.get("trusted-host", "").split()),
        cert=settings.get("cert"),
        client_cert=settings.get("client-cert"),
        proxy=settings.get("proxy"),
        timeout=seconds,
    )


def _option(name: str) -> str:
    option = name.lower().replace("_", "-").removeprefix("--")
    return "timeout" if option == "default-timeout" else option


def _flag(name: str, settings: Mapping[str, str]) -> bool:
    text = settings.get(name, "false").lower()
    if text not in ("y", "yes", "t", "true", "on", "1", "n", "no", "f", "false", "off", "0"):
        raise PybuildError(f"pip's setting {name} = {text!r} is neither true nor false", REMEDY)
    return text in ("y", "yes", "t", "true", "on", "1")


def _as_url(location: str) -> str:
    if "://" in location or location.startswith("file:"):
        return location
    return Path(location).expanduser().absolute().as_uri()


def safe_url(url: str) -> str:
    """`url` without a user's name and password, for messages."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment=""))


@dataclass(frozen=True)
class Listing:
    """A project's files over all locations, and each location that could not be asked, with the reason."""

    files: tuple[DistributionPackage, ...]
    failures: tuple[str, ...]


class Index:
    """All the locations of a pip configuration, asked together. Threads may share it."""

    def __init__(self, config: PipConfig, *, connections: int = 8) -> None:
        self._config = config
        self._session = _Session(config, connections)
        self._clients = [PyPISimple(url, session=self._session) for url in config.index_urls]

    @property
    def locations(self) -> list[str]:
        """The places that are asked, for messages."""
        return [safe_url(url) for url in (*self._config.index_urls, *self._config.find_links)]

    @functools.cache  # noqa: B019 - an Index lives as long as its command
    def listing(self, project: str) -> Listing:
        """The files of `project`, everywhere. Never raises: what could not be asked is in `failures`."""
        files: list[DistributionPackage] = []
        failures: list[str] = []
        for client in self._clients:
            try:
                files += client.get_project_page(project).packages
            except NoSuchProjectError:
                pass
            except (requests.RequestException, ValueError) as error:
                failures.append(f"{safe_url(client.endpoint)}: {explain(error)}")
        for location in self._config.find_links:
            try:
                links = self._links(location)
            except (requests.RequestException, OSError, ValueError) as error:
                failures.append(f"{safe_url(location)}: {explain(error)}")
                continue
            packages = (DistributionPackage.from_link(link, project) for link in links)
            files += [p for p in packages if p.project and _normal(p.project) == _normal(project)]
        return Listing(tuple(files), tuple(failures))

    @functools.cache  # noqa: B019
    def _links(self, location: str) -> list[Link]:
        """The links of a --find-links location: a directory's files, or those of a page."""
        if location.startswith("file:") and (folder := _local(location)).is_dir():
            return [Link(text=p.name, url=p.as_uri(), attrs={}) for p in sorted(folder.iterdir()) if p.is_file()]
        response = self._session.get(location)
        response.raise_for_status()
        links = RepositoryPage.from_html(response.content, base_url=response.url, from_encoding=None).links
        # On such a page a link's text may be anything (PEP 503 is about indexes): pip takes the address's end.
        return [Link(unquote(urlsplit(link.url).path.rpartition("/")[2]), link.url, link.attrs) for link in links]

    def open(self, url: str, *, start: int = 0, end: int | None = None) -> requests.Response:
        """The open response for the bytes of `url` from `start` to before `end`.

        Its status is 206 where the server keeps to the range and 200 where it sends all of the file. Raises
        requests.RequestException.
        """
        headers = {"Accept-Encoding": "identity"}
        if start or end is not None:
            headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        response = self._session.get(url, headers=headers, stream=True)
        response.raise_for_status()
        return response


def explain(error: Exception) -> str:
    """One line, in a user's words, for what went wrong between here and an index."""
    response = getattr(error, "response", None)
    if isinstance(response, requests.Response):
        hint = {401: ": it wants a user and password (netrc, or in the URL)", 403: ": access refused"}
        return f"HTTP {response.status_code} {response.reason}{hint.get(response.status_code, '')}"
    if isinstance(error, requests.exceptions.ProxyError):
        return "the proxy can't be reached or refuses"
    if isinstance(error, requests.exceptions.SSLError):
        return f"its certificate is not trusted here (PIP_CERT names a CA bundle): {_cause(error)}"
    if isinstance(error, requests.exceptions.Timeout):
        return "no answer in time"
    return _cause(error)


def _cause(error: BaseException) -> str:
    """The innermost reason of a chain of wrapped errors: `Connection refused`."""
    while inner := (
        getattr(error, "reason", None)
        or error.__cause__
        or error.__context__
        or next((a for a in error.args if isinstance(a, BaseException)), None)
    ):
        if not isinstance(inner, BaseException):
            break
        error = inner
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__


def _normal(project: str) -> str:
    return project.lower().replace("_", "-").replace(".", "-")


def _local(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


class _Session(requests.Session):
    """A session with pip's certificates, proxy, time limit and credentials, that reads file: too."""

    def __init__(self, config: PipConfig, connections: int) -> None:
        super().__init__()
        self._timeout = config.timeout
        # A server in trouble is worth some patience; one that refuses, or whose certificate is wrong, is not.
        retries = urllib3.Retry(
            total=3,
            connect=1,
            other=0,
            backoff_factor=0.2,
            status_forcelist=(500, 502, 503, 504),
            raise_on_status=False,
        )
        self.mount("https://", HTTPAdapter(pool_maxsize=connections, max_retries=retries))
        self.mount("http://", HTTPAdapter(pool_maxsize=connections, max_retries=retries))
        self.mount("file://", _FileAdapter())
        for host in config.trusted_hosts:
            self.mount(f"https://{host}/", _Insecure(pool_maxsize=connections, max_retries=retries))
            if ":" not in host:
                self.mount(f"https://{host}:", _Insecure(pool_maxsize=connections, max_retries=retries))
        self._cert = config.cert
        if config.client_cert:
            self.cert = config.client_cert
        if config.proxy:
            # requests lets the environment's proxy win over the session's; pip's setting wins over both.
            self.trust_env = False
            self.proxies = {"http": config.proxy, "https": config.proxy}
        self.auth = _Credentials((*config.index_urls, *config.find_links))

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        kwargs.setdefault("timeout", self._timeout)
        # With the request, because requests lets REQUESTS_CA_BUNDLE win over the session's.
        kwargs.setdefault("verify", self._cert)
        return super().request(*args, **kwargs)


class _Credentials(AuthBase):
    """A location's user and password, sent to that host alone; else the ones in netrc."""

    def __init__(self, urls: tuple[str, ...]) -> None:
        self._known = {urlsplit(url).netloc.rpartition("@")[2]: get_auth_from_url(url) for url in urls}

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        url = request.url or ""
        host = urlsplit(url).netloc.rpartition("@")[2]
        for user, password in (
            get_auth_from_url(url),
            self._known.get(host, ("", "")),
            get_netrc_auth(url) or ("", ""),
        ):
            if user or password:
                HTTPBasicAuth(user, password)(request)
                break
        return request


class _Insecure(HTTPAdapter):
    """For pip's trusted-host: the certificate is not checked (a pin's hash is, whoever serves it)."""

    def send(self, *args: Any, **kwargs: Any) -> requests.Response:
        kwargs["verify"] = False
        return super().send(*args, **kwargs)


class _FileAdapter(BaseAdapter):
    """file: URLs: a file, from the first byte of a range on, or a directory's index.html."""

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:  # type: ignore[override]
        response = requests.Response()
        response.request, response.url = request, request.url or ""
        path = _local(response.url)
        if path.is_dir():
            path /= "index.html"
        try:
            file = path.open("rb")
        except OSError as error:
            response.status_code, response.reason, response.raw = 404, error.strerror or "", BytesIO()
            return response
        size = os.fstat(file.fileno()).st_size
        headers = {"Content-Length": str(size)}
        response.status_code, response.reason, response.raw = 200, "OK", file
        if path.suffix in (".html", ".htm"):
            headers["Content-Type"] = "text/html"
        if wanted := request.headers.get("Range"):
            first, _, last = str(wanted).removeprefix("bytes=").partition("-")
            start, end = int(first), min(size, int(last) + 1 if last else size)
            if start >= size:
                response.status_code, response.reason = 416, "Range Not Satisfiable"
            else:
                file.seek(start)
                response.status_code, response.reason = 206, "Partial Content"
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
                if last:
                    response.raw = BytesIO(file.read(end - start))
                    file.close()
        response.headers = CaseInsensitiveDict(headers)
        return response

    def close(self) -> None:
        """Nothing is held open."""


def user_index(*, connections: int = 8) -> Index:
    """The index of the user's pip. Raises PybuildError where its settings can't be read or name none."""
    config = read_pip_config(os.environ)
    if not config.index_urls and not config.find_links:
        raise BuildError("pip is told no-index, and no find-links: there is nowhere to download from", REMEDY)
    for file in filter(None, (config.cert, config.client_cert)):
        if not Path(file).exists():
            raise PybuildError(f"pip's certificate file {file} is not there", REMEDY)
    urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    return Index(config, connections=connections)
