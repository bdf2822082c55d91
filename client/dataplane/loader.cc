#include "client/dataplane/loader.h"

#include <dlfcn.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/config.h"

namespace zeroshard {
namespace {

constexpr char kFile[] = "libzeroshard-dataplane.so";

std::vector<std::string> Candidates() {
  if (const auto file = Env("ZEROSHARD_DATAPLANE"); file && !file->empty()) return {*file};
  std::vector<std::string> candidates;
  Dl_info here = {};
  if (dladdr(reinterpret_cast<const void*>(&LoadDataPlaneLibrary), &here) != 0 &&
      here.dli_fname != nullptr) {
    const std::string file = here.dli_fname;
    const size_t slash = file.rfind('/');
    if (slash != std::string::npos) {
      candidates.push_back(absl::StrCat(file.substr(0, slash + 1), kFile));
    }
  }
  candidates.push_back(kFile);
  return candidates;
}

}  // namespace

absl::StatusOr<const DataPlaneLibrary*> LoadDataPlaneLibrary() {
  std::vector<std::string> problems;
  for (const std::string& file : Candidates()) {
    void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      problems.emplace_back(dlerror());
      continue;
    }
    using Entry = const DataPlaneLibrary* (*)(uint32_t);
    const auto entry = reinterpret_cast<Entry>(dlsym(handle, kDataPlaneSymbol));
    const DataPlaneLibrary* library = entry == nullptr ? nullptr : entry(kDataPlaneVersion);
    if (library != nullptr && library->version == kDataPlaneVersion) return library;
    problems.push_back(
        absl::StrCat(file, ": is of another version than this SDK (", kDataPlaneVersion, ")"));
    dlclose(handle);
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "a job on GPUs needs ", kFile,
      " beside the program or in $ZEROSHARD_DATAPLANE: ", absl::StrJoin(problems, "; ")));
}

}  // namespace zeroshard
