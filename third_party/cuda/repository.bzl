"""@cuda: the CUDA Toolkit (and NCCL) of this machine, or an empty repository without one.

Targets, in both cases:
  @cuda//:present   config_setting, true where the toolkit was found: select({"@cuda//:present": ...})
  @cuda//:headers   the toolkit's headers (empty library without the toolkit)
  @cuda//:cudart    the run-time library (empty library without the toolkit)
  @cuda//:nccl      NCCL (empty library without the toolkit)
The folder is $CUDA_HOME, by default /usr/local/cuda.
"""

_BUILD = """
load("@zeroshard//third_party/cuda:present.bzl", "bool_flag")

package(default_visibility = ["//visibility:public"])

bool_flag(
    name = "found",
    build_setting_default = {found},
)

config_setting(
    name = "present",
    flag_values = {{":found": "True"}},
)

cc_library(
    name = "headers",
    hdrs = {headers},
    includes = {includes},
)

cc_library(
    name = "cudart",
    linkopts = {cudart},
    deps = [":headers"],
)

cc_library(
    name = "nccl",
    linkopts = {nccl},
    deps = [":cudart"],
)

exports_files(glob(["toolkit/bin/nvcc"], allow_empty = True))
"""

def _cuda_repository_impl(ctx):
    home = ctx.os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = ctx.path(home + "/include/cuda.h").exists and ctx.path(home + "/bin/nvcc").exists
    headers, includes, cudart, nccl = "[]", "[]", [], []
    if found:
        ctx.symlink(home, "toolkit")
        headers = 'glob(["toolkit/include/**"], exclude_directories = 1)'
        includes = '["toolkit/include", "toolkit/include/cccl"]'
        libs = home + ("/lib64" if ctx.path(home + "/lib64").exists else "/lib")
        cudart = ["-L" + libs, "-Wl,-rpath," + libs, "-lcudart"]
        nccl = ["-L" + libs, "-Wl,-rpath," + libs, "-lnccl"]
    ctx.file("BUILD.bazel", _BUILD.format(
        found = found,
        headers = headers,
        includes = includes,
        cudart = cudart,
        nccl = nccl,
    ))

cuda_repository = repository_rule(
    implementation = _cuda_repository_impl,
    environ = ["CUDA_HOME"],
    local = True,
)
