"""What a process needs before it imports DeepSpeed in the environment of tests/bench/peers."""

import os
import pathlib
import sys

def prepare():
    """DeepSpeed runs on the CPU, with the operators compiled beside the interpreter."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(pathlib.Path(sys.prefix) / "extensions"))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # DeepSpeed compiles with the ninja beside the interpreter.
    os.environ["PATH"] = f"{pathlib.Path(sys.prefix) / 'bin'}:{os.environ.get('PATH', '')}"
