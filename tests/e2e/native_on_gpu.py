"""A step of a job on a GPU through the native module, without PyTorch: run by test_gpu.py in a process of its own.

Arguments: the module's file, the daemon's socket. Ends with one line of JSON.
"""

import ctypes
import gc
import importlib.machinery
import importlib.util
import json
import struct
import sys

PARAMETERS = [
    {"name": "a.weight", "shape": [100, 200], "dtype": "bfloat16", "module": "a"},
    {"name": "b.weight", "shape": [50, 400], "dtype": "bfloat16", "module": "b"},
]
CONFIG = """{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "gradient_clipping": 0,
             "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
             "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10}}"""


def load(path):
    loader = importlib.machinery.ExtensionFileLoader("zeroshard._native", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location("zeroshard._native", path, loader=loader))
    loader.exec_module(module)
    return module


def fields(capsule):
    """(address, device type, device, code, bits, shape) by DLPack's layout."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    data = ctypes.string_at(pointer(capsule, b"dltensor"), 48)
    address, kind, device, ndim, code, bits, lanes, shape, _, offset = struct.unpack("<QiiiBBHQQQ", data)
    assert (lanes, offset) == (1, 0)
    return address, kind, device, code, bits, list((ctypes.c_int64 * ndim).from_address(shape))


def main():
    native = load(sys.argv[1])
    session = native.attach(sys.argv[2], "native", 0, 1, 0, PARAMETERS, [{"lr": 0.5}], CONFIG, {}, 20_000, cuda_device=0)
    assert session.on_device and session.device["ordinal"] == 0 and len(session.device["uuid"]) == 16
    assert session.config["data_plane"]
    window = memoryview(session.gradient_window).cast("B")
    units = session.units()
    for number, unit in enumerate(units):
        offset = session.acquire(unit["bytes"])
        window[offset : offset + unit["bytes"]] = b"\x80\x3f" * unit["elements"]  # 1.0
        session.wait(session.put(number, 0, unit["elements"], offset, True))
    addresses = []
    for number, unit in enumerate(units):
        session.gather([number], False, False)
        session.wait_on([number], 0)
        address, *rest = fields(session.parameter_tensor(number, 256, [2, 128]))
        assert rest == [2, 0, 4, 16, [2, 128]], rest
        assert fields(session.parameter_tensor(number, 0, [1]))[0] == address - 512
        addresses.append(address)
        session.release([number], 0)
        slot, capsule = session.acquire_device(number)
        assert fields(capsule)[1:] == (2, 0, 4, 16, [unit["elements"]])
        session.scatter(number, 0, slot, b"", 1.0, 0)
    session.micro_end(0)
    session.wait(session.step(1, user_state=b"mine"))
    result = session.step_result()
    session.barrier()
    stats = session.device_stats
    kept = session.device_memory
    session.detach(True)
    session.close()
    again = native.attach(sys.argv[2], "native", 0, 1, 0, PARAMETERS, [{"lr": 0.5}], CONFIG, {}, 20_000,
                          cuda_device=0, device_memory=kept)
    assert (again.steps, again.user_state) == (1, b"mine")
    assert [fields(again.parameter_tensor(u, 256, [1]))[0] for u in range(len(units))] == addresses
    try:
        again.parameter_tensor(0, 0, [10**9])
        raise AssertionError("a tensor beyond the unit")
    except Exception as error:
        assert "elements" in str(error), error
    again.detach(False)
    del again, session
    gc.collect()
    print(json.dumps({"step": result["step"], "skipped": result["skipped"], "slots": stats["slot_bytes"]}))


main()
