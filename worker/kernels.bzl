"""Numeric kernels, compiled once per instruction set from the same source."""

load("@rules_cc//cc:defs.bzl", "cc_library")

# Fast enough to be limited by memory, and the same bits on every instruction set: no fma
# contraction, and nothing of -ffast-math.
KERNEL_COPTS = [
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    # No calls of memcpy and memset in place of small loops.
    "-fno-tree-loop-distribute-patterns",
    "-Wno-psabi",
]

def isa_kernel_library(name, srcs, deps = [], hdrs = []):
    """`srcs` compiled for x86-64-v2, v3 and v4, with ZS_ISA defined as V2, V3 or V4.

    The sources may contain no function with external linkage and call nothing of the standard
    library (worker/kernel_math.h says why).

    Args:
      name: the library that holds all of them.
      srcs: the kernel files.
      deps: header-only libraries.
      hdrs: headers that declare the tables.
    """
    for level in ["2", "3", "4"]:
        cc_library(
            name = name + "_v" + level,
            srcs = srcs + hdrs,
            copts = KERNEL_COPTS + ["-march=x86-64-v" + level],
            local_defines = ["ZS_ISA=V" + level],
            visibility = ["//visibility:private"],
            deps = deps,
        )
    cc_library(
        name = name,
        hdrs = hdrs,
        visibility = ["//visibility:private"],
        deps = deps + [":" + name + "_v" + level for level in ["2", "3", "4"]],
    )
