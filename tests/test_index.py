from __future__ import annotations

import os
import ssl
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import certifi
import pytest
from index_server import IndexServer, serve
from pypi_simple import PYPI_SIMPLE_ENDPOINT

import pybuild.index
from pybuild.errors import BuildError, PybuildError
from pybuild.index import Index, PipConfig, pip_settings, read_pip_config, safe_url, user_index


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment whose every configuration file is under `tmp_path`, and none there yet."""
    monkeypatch.setattr(pybuild.index, "ETC", tmp_path / "etc")
    return {
        "HOME": str(tmp_path / "home"),
        "XDG_CONFIG_DIRS": f"{tmp_path}/xdg1:{tmp_path}/xdg2",
        "VIRTUAL_ENV": str(tmp_path / "venv"),
    }


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_without_settings_it_is_pips_own_index(environ: dict[str, str]) -> None:
    assert read_pip_config(environ) == PipConfig(index_urls=(PYPI_SIMPLE_ENDPOINT,))


def test_every_setting(environ: dict[str, str], tmp_path: Path) -> None:
    write(
        tmp_path / "home/.config/pip/pip.conf",
        f"""
[global]
index_url = https://one.invalid/simple
extra-index-url = https://two.invalid/simple
    file:///three
find-links = {tmp_path} https://four.invalid/links
trusted-host = one.invalid two.invalid:8443
cert = /a.pem
client-cert = /b.pem
proxy = http://proxy.invalid:3128
timeout = 60
""",
    )
    assert read_pip_config(environ) == PipConfig(
        index_urls=("https://one.invalid/simple", "https://two.invalid/simple", "file:///three"),
        find_links=(tmp_path.as_uri(), "https://four.invalid/links"),
        trusted_hosts=("one.invalid", "two.invalid:8443"),
        cert="/a.pem",
        client_cert="/b.pem",
        proxy="http://proxy.invalid:3128",
        timeout=60.0,
    )


def test_a_later_file_wins_and_the_environment_over_all(environ: dict[str, str], tmp_path: Path) -> None:
    def index() -> str:
        return pip_settings(environ).get("index-url", "")

    environ["PIP_CONFIG_FILE"] = str(tmp_path / "named.conf")
    places = [
        "xdg1/pip/pip.conf",
        "xdg2/pip/pip.conf",
        "etc/pip.conf",
        "home/.pip/pip.conf",
        "home/.config/pip/pip.conf",
        "venv/pip.conf",
    ]
    for place in places:
        write(tmp_path / place, f"[global]\nindex-url = {place}\n")
        assert index() == place
    write(tmp_path / "venv/pip.conf", "[global]\nindex-url = global\n[install]\nindex-url = install\n")
    assert index() == "install"
    environ["PIP_INDEX_URL"] = "environment"
    assert index() == "environment"
    environ["PIP_INDEX_URL"] = ""  # as if it were not there
    assert index() == "install"


def test_a_named_file_shuts_out_the_users(environ: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / "xdg1/pip/pip.conf", "[global]\ntimeout = 1\n")
    write(tmp_path / "home/.config/pip/pip.conf", "[global]\nindex-url = users\n")
    write(tmp_path / "named.conf", "[global]\ncert = named\n")
    environ["PIP_CONFIG_FILE"] = str(tmp_path / "named.conf")
    assert pip_settings(environ) | {"config-file": ""} == {"timeout": "1", "cert": "named", "config-file": ""}
    environ["PIP_CONFIG_FILE"] = os.devnull
    assert set(pip_settings(environ)) == {"config-file"}


@pytest.mark.parametrize("seed", [0, 1, 3, 6, 7])
def test_pip_itself_reads_the_same(
    environ: dict[str, str], tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pybuild.index, "ETC", Path("/etc"))  # pip's own can't be moved
    pip = [sys.executable, "-m", "pip", "--isolated", "--version"]
    if subprocess.run(pip, capture_output=True, check=False).returncode:
        pytest.skip("no pip for this Python")
    # `pip config` names its values by section and file, and which of them counts is for its commands to say;
    # so pip is asked through one: what `pip install` would take its defaults from.
    program = """
import sys
from pip._internal.commands import create_command
parser = create_command("install").parser
values = parser.get_default_values()
for name in ("index_url", "extra_index_urls", "find_links", "trusted_hosts", "no_index", "cert", "timeout"):
    print(name, repr(getattr(values, name)))
"""
    for place, bit in [("xdg1/pip/pip.conf", 1), ("home/.config/pip/pip.conf", 2), ("named.conf", 4)]:
        if seed & bit:
            write(
                tmp_path / place,
                f"[global]\nindex-url = http://{place}/global\nextra-index-url = http://a http://b\n"
                f"timeout = {20 + bit}\nno_index = yes\n"
                f"[install]\nindex_url = http://{place}/install\nno-index = off\n[download]\ncert = x\n",
            )
    environ["PIP_CONFIG_FILE"] = str(tmp_path / "named.conf")
    if seed % 3 == 0:
        environ |= {"PIP_FIND_LINKS": "/x /y", "PIP_TRUSTED_HOST": "h", "PIP_DEFAULT_TIMEOUT": "7"}
    # The site's file is of sys.prefix for pip; here and there it must be one that doesn't exist.
    environ["PATH"] = os.environ["PATH"]
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    theirs = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    ours = read_pip_config(environ)
    expected = (theirs["index_url"][1:-1], *eval(theirs["extra_index_urls"]))
    if eval(theirs["no_index"]):
        expected = ()
    assert [url.rstrip("/") for url in ours.index_urls] == [url.rstrip("/") for url in expected]
    assert [f"file://{p}" for p in eval(theirs["find_links"])] == list(ours.find_links)
    assert tuple(eval(theirs["trusted_hosts"])) == ours.trusted_hosts
    assert float(theirs["timeout"]) == ours.timeout
    assert repr(ours.cert) == theirs["cert"]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[global]\ntimeout = soon\n", "timeout"),
        ("[global]\ntimeout = -1\n", "timeout"),
        ("[global]\nno-index = perhaps\n", "no-index"),
        ("index-url = x\n", "pip.conf"),
        ("\ufeff[global\n", "pip.conf"),
    ],
)
def test_a_setting_that_pip_would_refuse(environ: dict[str, str], tmp_path: Path, text: str, wrong: str) -> None:
    write(tmp_path / "venv/pip.conf", text)
    with pytest.raises(PybuildError, match=wrong) as caught:
        read_pip_config(environ)
    assert "Traceback" not in str(caught.value)


def test_bytes_that_are_no_text(environ: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / "venv/pip.conf", "")
    (tmp_path / "venv/pip.conf").write_bytes(b"[global]\nindex-url = \xff\xfe\n")
    with pytest.raises(PybuildError, match=r"pip\.conf"):
        read_pip_config(environ)


def test_no_index_and_nowhere_else(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", environ | {"PIP_NO_INDEX": "1"})
    with pytest.raises(BuildError, match="nowhere to download from"):
        user_index()


def test_a_certificate_that_is_not_there(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", environ | {"PIP_CERT": "/absent.pem"})
    with pytest.raises(PybuildError, match=r"/absent\.pem is not there"):
        user_index()


def test_a_url_for_messages_has_no_password() -> None:
    assert safe_url("https://me:s3cret@host.invalid:8/simple/?a=b#sha256=0") == ("https://host.invalid:8/simple/?a=b")


def test_a_page_that_is_no_index_is_a_failure() -> None:
    with serve(IndexServer(files={"demo-1.tar.gz": b"x"})) as server:
        server.page = lambda project: b"{"  # type: ignore[method-assign]
        listing = Index(PipConfig(index_urls=(server.url,))).listing("demo")
    assert listing.files == ()
    assert len(listing.failures) == 1
    assert "\n" not in listing.failures[0]


def test_a_proxy_carries_everything() -> None:
    with serve(IndexServer()) as proxy:
        config = PipConfig(index_urls=("http://index.invalid/simple/",), proxy=f"http://127.0.0.1:{proxy.port}")
        assert Index(config).listing("demo").files == ()
        assert proxy.asked("demo") == [None]


def test_a_proxy_that_is_down_is_named() -> None:
    config = PipConfig(index_urls=("http://index.invalid/simple/",), proxy="http://127.0.0.1:9")
    (failure,) = Index(config).listing("demo").failures
    assert failure.endswith("the proxy can't be reached or refuses")


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
def test_a_certificate_is_checked_but_for_trusted_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", certifi.where())  # pip's own setting wins over it
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=x"),
            *("-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("no openssl to make a certificate with")
    (tmp_path / "simple/demo").mkdir(parents=True)
    (tmp_path / "simple/demo/index.html").write_text('<a href="demo-1.tar.gz">demo-1.tar.gz</a>')

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(tmp_path))  # type: ignore[arg-type]

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"https://127.0.0.1:{server.server_address[1]}/simple/"
    try:
        (failure,) = Index(PipConfig(index_urls=(url,))).listing("demo").failures
        assert "certificate is not trusted" in failure
        assert Index(PipConfig(index_urls=(url,), trusted_hosts=("127.0.0.1",))).listing("demo").files
        assert Index(PipConfig(index_urls=(url,), cert=str(tmp_path / "cert.pem"))).listing("demo").files
        other = PipConfig(index_urls=(url,), trusted_hosts=("127.0.0.1:1", "127.0.0.2"))
        assert Index(other).listing("demo").files == ()
    finally:
        server.shutdown()
        server.server_close()
