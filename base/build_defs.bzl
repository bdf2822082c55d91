"""Build macros shared by the whole tree."""

load("@rules_cc//cc:defs.bzl", "cc_library")

def proto_cc(name, srcs, deps = [], grpc = False, visibility = None):
    """A C++ library made from .proto files by protoc, and by grpc_cpp_plugin when `grpc` is True.

    Files import one another by their path from the repository root ("proto/x.proto"), and C++ code
    includes "proto/x.pb.h" and "proto/x.grpc.pb.h".

    Args:
      name: the library; NAME_protos is the filegroup of its .proto files with all that they import.
      srcs: .proto files of this package.
      deps: other proto_cc libraries, with an explicit target name ("//proto:records_cc", ":x_cc").
      grpc: whether the files define services.
      visibility: of the library and the filegroup.
    """
    protos = name + "_protos"
    native.filegroup(
        name = protos,
        srcs = srcs + [dep + "_protos" for dep in deps],
        visibility = visibility,
    )

    suffixes = [".pb"] + ([".grpc.pb"] if grpc else [])
    stems = [src[:-len(".proto")] for src in srcs]
    hdrs = [stem + suffix + ".h" for stem in stems for suffix in suffixes]
    sources = [stem + suffix + ".cc" for stem in stems for suffix in suffixes]
    package = native.package_name()
    command = ["/usr/bin/protoc", "-I.", "-I/usr/include", "--cpp_out=$(GENDIR)"]
    if grpc:
        command += [
            "--plugin=protoc-gen-grpc=/usr/bin/grpc_cpp_plugin",
            "--grpc_out=$(GENDIR)",
        ]
    native.genrule(
        name = name + "_generate",
        srcs = [":" + protos],
        outs = hdrs + sources,
        cmd = " ".join(command + [package + "/" + src for src in srcs]),
        message = "Generating C++ from the protocol files of",
        visibility = ["//visibility:private"],
    )
    cc_library(
        name = name,
        srcs = sources,
        hdrs = hdrs,
        copts = ["-w"],
        visibility = visibility,
        deps = deps + ["@system//:protobuf"] + (["@system//:grpc++"] if grpc else []),
    )
