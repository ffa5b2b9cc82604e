from __future__ import annotations

import os
import zipfile
from pathlib import Path

from pybuild.facts.caches import CachedWheel, cached_wheels, torch_wheels

NAME = "flash_attn-2.8.3-cp312-cp312-linux_x86_64"


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_the_layout_of_pip_24_and_uv_0_13(tmp_path: Path) -> None:
    cache = tmp_path / "home/me/.cache"
    built_by_pip = touch(cache / f"pip/wheels/bc/de/a5/b102eac8/{NAME}.whl")
    touch(cache / "pip/wheels/00/de/a5/b102eac8/pure-1.0-py3-none-any.whl")
    touch(cache / "pip/http-v2/0/1/2/3/4/01234")
    from_path = touch(cache / f"uv/sdists-v11/path/53e970de/-q05CS0y/{NAME}.whl")
    from_index = touch(cache / f"uv/sdists-v11/index/1e7becee/flash-attn/2.8.3/_YlIWYtN/{NAME}.whl")
    from_pypi = touch(cache / f"uv/sdists-v11/pypi/flash-attn/2.8.3/_YlIWYtN/{NAME}.whl")
    archive = tmp_path / "home/me/.cache/uv/archive-v0/co_7wxyO"
    archive.mkdir(parents=True)
    link = cache / "uv/wheels-v8/pypi/xformers/0.0.35-py39-none-manylinux_2_28_x86_64"
    touch(link.with_suffix(".http"))
    link.symlink_to("../../../archive-v0/co_7wxyO")
    url = cache / "uv/wheels-v8/url/0a1b2c3d/flash-attn/2.8.3+cu12torch2.8cxx11abitrue-cp312-cp312-linux_x86_64"
    url.mkdir(parents=True)
    found = cached_wheels({"HOME": "/home/me"}, tmp_path)
    assert set(found) == {
        CachedWheel("pip", built_by_pip, f"{NAME}.whl"),
        CachedWheel("uv", from_path, f"{NAME}.whl"),
        CachedWheel("uv", from_index, f"{NAME}.whl"),
        CachedWheel("uv", from_pypi, f"{NAME}.whl"),
        CachedWheel("uv", link, "xformers-0.0.35-py39-none-manylinux_2_28_x86_64.whl"),
        CachedWheel("uv", url, "flash_attn-2.8.3+cu12torch2.8cxx11abitrue-cp312-cp312-linux_x86_64.whl"),
    }


def test_where_the_caches_are(tmp_path: Path) -> None:
    touch(tmp_path / f"x/pip/wheels/1/2/3/4/{NAME}.whl")
    touch(tmp_path / f"p/wheels/1/2/3/4/{NAME}.whl")
    touch(tmp_path / f"u/sdists-v9/path/1/2/{NAME}.whl")
    assert [w.path for w in cached_wheels({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, tmp_path)] == [
        tmp_path / f"x/pip/wheels/1/2/3/4/{NAME}.whl"
    ]
    environ = {"HOME": "/h", "XDG_CACHE_HOME": "/x", "PIP_CACHE_DIR": "/p", "UV_CACHE_DIR": "/u"}
    assert [w.tool for w in cached_wheels(environ, tmp_path)] == ["pip", "uv"]
    assert cached_wheels({}, tmp_path) == []


# Compared with torch

LIBC10 = Path(__file__).parent / "fatbins/libc10.so"
EXTENSION = (Path(__file__).parent / "fatbins/extension.so").read_bytes()


def make_wheel(folder: Path, name: str = NAME, requires: str = "torch") -> CachedWheel:
    path = folder / f"{name}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("flash_attn_2_cuda.so", EXTENSION)
        wheel.writestr("flash_attn-2.8.3.dist-info/METADATA", f"Name: flash-attn\nRequires-Dist: {requires}\n")
    return CachedWheel("pip", path, path.name)


def unpacked(folder: Path) -> CachedWheel:
    (folder / "a.dist-info").mkdir(parents=True)
    (folder / "a.dist-info/METADATA").write_text("Name: flash-attn\nRequires-Dist: torch (>=2.0)\n")
    (folder / "flash_attn_2_cuda.so").write_bytes(EXTENSION)
    return CachedWheel("uv", folder, f"{NAME}.whl")


def test_its_symbols_are_compared(tmp_path: Path) -> None:
    for wheel in (make_wheel(tmp_path), unpacked(tmp_path / "u")):
        (found,) = torch_wheels([wheel], "cp312", [LIBC10])
        assert found.wheel == wheel
        assert found.artifact.name == "flash-attn"
        assert found.missing == ("_ZN3c104warnEi",)


def test_there_is_a_limit_to_what_is_unpacked(tmp_path: Path) -> None:
    one = make_wheel(tmp_path)
    os.utime(one.path, (1, 1))
    first, second = torch_wheels([one, one], "cp312", [LIBC10], budget=len(EXTENSION))
    assert first.missing and second.missing is None
    assert second.older_than_torch
    os.utime(one.path, (2**33, 2**33))
    (newer,) = torch_wheels([one], "cp312", [LIBC10], budget=0)
    assert not newer.older_than_torch
    # What uv unpacked already costs nothing.
    (free,) = torch_wheels([unpacked(tmp_path / "u")], "cp312", [LIBC10], budget=len(EXTENSION))
    assert free.missing


def test_wheels_that_are_none_of_our_business(tmp_path: Path) -> None:
    damaged = make_wheel(tmp_path, "damaged-1-cp312-cp312-linux_x86_64")
    damaged.path.write_bytes(b"PK")
    gone = CachedWheel("pip", tmp_path / f"gone/{NAME}.whl", f"{NAME}.whl")
    wheels = [damaged, gone, make_wheel(tmp_path, requires="numpy")]
    assert torch_wheels(wheels, "cp312", [LIBC10]) == []
    assert torch_wheels([make_wheel(tmp_path)], "cp311", [LIBC10]) == []
    assert torch_wheels([make_wheel(tmp_path, "a-1-cp39-abi3-linux_x86_64")], "cp312", [LIBC10])


def test_without_torch_here_nothing_is_compared(tmp_path: Path) -> None:
    (found,) = torch_wheels([make_wheel(tmp_path)], "cp312", [])
    assert found.missing is None
    assert not found.older_than_torch
