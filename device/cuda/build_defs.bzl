"""What targets that need the CUDA Toolkit are marked with."""

# target_compatible_with: without the toolkit `bazel build //...` and `bazel test //...` pass these by.
CUDA_ONLY = select({
    "@cuda//:present": [],
    "//conditions:default": ["//third_party/cuda:missing"],
})
