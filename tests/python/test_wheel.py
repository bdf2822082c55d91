"""The wheel: it installs with pip, is reproducible, and its extension loads beside PyTorch in both orders."""

import ctypes
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARIES = pathlib.Path(os.environ.get("ZEROSHARD_BIN_DIR", ROOT / "bazel-bin"))
NATIVE = BINARIES / "client/python/_native.so"
DATAPLANE = BINARIES / "client/dataplane/libzeroshard-dataplane.so"

NATIVE_FIRST = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("zeroshard._native", sys.argv[1] + "/zeroshard/_native.so")
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
import torch
"""
TORCH_FIRST = """
import torch, zeroshard, zeroshard._native as native
"""
# gRPC, protobuf and Abseil run before the connection fails, and so does an exception between C++ and Python.
USE = """
from zeroshard.errors import ZeroShardError
try:
    native.attach("/nowhere", "job", 0, 1, 0, [{"name": "w", "shape": [3]}], [], "{}", {}, 1000)
except ZeroShardError as error:
    assert error.code == "NOT_FOUND", error
    assert torch.ones(8, 8).matmul(torch.ones(8, 8)).sum() == 512
    print("fine")
"""


def build(out):
    subprocess.run(
        [str(ROOT / "client/python/build_wheel"), "--native", str(NATIVE), "--out", str(out)], check=True, timeout=120
    )
    (wheel,) = out.glob("zeroshard-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if not NATIVE.exists():
        pytest.skip(f"not built: {NATIVE}")
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(target), str(wheel)],
        capture_output=True, text=True, timeout=120,
    )
    if "No module named pip" in result.stderr:
        pytest.skip("pip is not installed")
    assert result.returncode == 0, result.stderr
    return target


def test_the_wheel_holds_the_package_and_the_extension(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "zeroshard/_native.so" in names and "zeroshard/__init__.py" in names
    assert not [name for name in names if "__pycache__" in name]
    assert f"cp{sys.version_info.major}{sys.version_info.minor}" in wheel.name


def test_the_data_plane_lies_beside_the_extension_and_is_found_there(tmp_path):
    """By a rank that says it has a GPU: here the error tells that there is none."""
    if not (NATIVE.exists() and DATAPLANE.exists()):
        pytest.skip(f"not built: {DATAPLANE}")
    try:
        ctypes.CDLL("libcuda.so.1")
        pytest.skip("there is a driver")
    except OSError:
        pass
    stage = tmp_path / "package"
    subprocess.run([str(ROOT / "client/python/build_wheel"), "--native", str(NATIVE), "--dataplane", str(DATAPLANE),
                    "--stage", str(stage)], check=True, timeout=120)
    text = USE.replace("1000)", "1000, cuda_device=0)").replace("NOT_FOUND", "UNAVAILABLE")
    text = "import torch, zeroshard, zeroshard._native as native" + text.replace(
        'print("fine")', 'assert "no CUDA device" in str(error), error\n    print("fine")')
    environment = {**os.environ, "PYTHONPATH": str(stage), "LD_LIBRARY_PATH": ""}
    result = subprocess.run(["/usr/bin/python3", "-c", text], env=environment, capture_output=True, text=True, timeout=60)
    assert result.stdout == "fine\n", result.stderr


def test_the_same_content_makes_the_same_wheel(wheel, tmp_path):
    assert build(tmp_path).read_bytes() == wheel.read_bytes()


@pytest.mark.parametrize("order", [TORCH_FIRST, NATIVE_FIRST], ids=["torch first", "extension first"])
def test_the_extension_loads_beside_torch(installed, order):
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    result = subprocess.run(
        [sys.executable, "-c", order + USE, str(installed)], capture_output=True, text=True, timeout=120, env=environment,
        cwd="/",
    )
    assert (result.returncode, result.stdout) == (0, "fine\n"), result.stderr


def test_the_extension_shows_one_symbol_of_its_own():
    if not NATIVE.exists():
        pytest.skip(f"not built: {NATIVE}")
    result = subprocess.run(["nm", "-D", "--defined-only", str(NATIVE)], capture_output=True, text=True, timeout=60)
    strong = [line for line in result.stdout.splitlines() if " T " in line or " D " in line]
    assert [line.split()[-1] for line in strong] == ["PyInit__native"]
