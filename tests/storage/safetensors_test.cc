#include "storage/safetensors.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <csignal>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/unique_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/file_io.h"
#include "storage/json_text.h"
#include "tests/storage/temp_dir.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;
using Metadata = std::map<std::string, std::string>;

UniqueFd NewFile(const TempDir& dir) {
  return UniqueFd(::open(dir.Path("f").c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600));
}

TensorSpec Spec(std::string name, std::vector<uint64_t> shape, DType dtype = DType::kFloat32,
                std::vector<std::string> aliases = {}) {
  return {std::move(name), std::move(aliases), std::move(shape), dtype};
}

std::string Bytes(size_t size, char first) {
  std::string bytes;
  for (size_t i = 0; i < size; ++i) bytes.push_back(static_cast<char>(first + i * 7));
  return bytes;
}

// The bytes of a tensor in a file.
std::string DataOf(const SafetensorsHeader& header, const std::string& file,
                   const std::string& name) {
  for (const TensorEntry& tensor : header.tensors) {
    if (tensor.name == name) {
      return file.substr(header.data_offset + tensor.begin, tensor.end - tensor.begin);
    }
  }
  ADD_FAILURE() << "no tensor " << name;
  return {};
}

TEST(SafetensorsTest, TensorsOfAllTypesComeBack) {
  TempDir dir;
  const UniqueFd fd = NewFile(dir);
  const std::vector<TensorSpec> specs = {Spec("half", {3}, DType::kBfloat16), Spec("full", {2, 3}),
                                         Spec("scalar", {}), Spec("none", {0, 4}, DType::kFloat16),
                                         Spec("odd", {5}, DType::kFloat16)};
  auto writer = SafetensorsWriter::Create(fd.get(), specs, {{"step", "7"}});
  ASSERT_TRUE(writer.ok()) << writer.status();
  const std::vector<std::string> data = {Bytes(6, 1), Bytes(24, 2), Bytes(4, 3), "", Bytes(10, 4)};
  for (size_t i = data.size(); i-- > 0;) {
    // In pieces, and the tensors in another order than that of the file.
    for (size_t at = 0; at < data[i].size(); at += 4) {
      ASSERT_TRUE(writer->Append(i, AsBytes(std::string_view(data[i]).substr(at, 4))).ok());
    }
  }
  const auto bytes = (*std::move(writer)).Finish();
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const auto header = ReadSafetensorsHeader(fd.get());
  ASSERT_TRUE(header.ok()) << header.status();
  const std::string file = dir.Read("f");
  EXPECT_EQ(file.size(), *bytes);
  EXPECT_EQ(header->data_offset % 8, 0u);
  ASSERT_EQ(header->tensors.size(), 5u);
  for (size_t i = 0; i < specs.size(); ++i) {
    EXPECT_EQ(DataOf(*header, file, specs[i].name), data[i]);
  }
  for (const TensorEntry& tensor : header->tensors) {
    EXPECT_EQ(tensor.begin % (tensor.dtype == "F32" ? 4 : 2), 0u) << tensor.name;
  }
  EXPECT_EQ(header->metadata, (Metadata{{"format", "pt"}, {"step", "7"}}));
}

TEST(SafetensorsTest, TiedNamesAreAllThere) {
  TempDir dir;
  const UniqueFd fd = NewFile(dir);
  auto writer = SafetensorsWriter::Create(
      fd.get(), {Spec("w", {2}, DType::kFloat32, {"v", "u"}), Spec("x", {1})}, {});
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE(writer->Append(0, AsBytes("abc")).ok());
  ASSERT_TRUE(writer->Append(0, AsBytes("defgh")).ok());
  ASSERT_TRUE(writer->Append(1, AsBytes("1234")).ok());
  ASSERT_TRUE((*std::move(writer)).Finish().ok());
  const auto header = ReadSafetensorsHeader(fd.get());
  ASSERT_TRUE(header.ok()) << header.status();
  for (const char* name : {"w", "v", "u"}) {
    EXPECT_EQ(DataOf(*header, dir.Read("f"), name), "abcdefgh");
  }
  EXPECT_EQ(header->metadata, (Metadata{{"format", "pt"}, {"alias:v", "w"}, {"alias:u", "w"}}));
}

// The example of docs/safetensors.md.
TEST(SafetensorsTest, TheHeaderIsTheOneOfTheFormatPage) {
  TempDir dir;
  const UniqueFd fd = NewFile(dir);
  auto writer = SafetensorsWriter::Create(fd.get(), {Spec("w", {2}, DType::kFloat32, {"v"})}, {});
  ASSERT_TRUE(writer.ok());
  const std::string expected =
      R"({"__metadata__":{"alias:v":"w","format":"pt"},"w":{"dtype":"F32","shape":[2],)"
      R"("data_offsets":[0,8]},"v":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})";
  EXPECT_EQ(dir.Read("f").substr(8, expected.size()), expected);
}

TEST(SafetensorsTest, NamesAreEscaped) {
  TempDir dir;
  const UniqueFd fd = NewFile(dir);
  const std::vector<std::string> names = {"a\"b\\c",          "tab\there", "gewicht_\xC3\xBC",
                                          "\xF0\x9F\x8E\x89", "{\"x\":1}", "\x01\x7F"};
  std::vector<TensorSpec> specs;
  for (const std::string& name : names) specs.push_back(Spec(name, {0}));
  auto writer = SafetensorsWriter::Create(fd.get(), specs, {{"quote\"", "new\nline"}});
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE((*std::move(writer)).Finish().ok());
  const auto header = ReadSafetensorsHeader(fd.get());
  ASSERT_TRUE(header.ok()) << header.status();
  std::set<std::string> found;
  for (const TensorEntry& tensor : header->tensors) found.insert(tensor.name);
  EXPECT_EQ(found, std::set<std::string>(names.begin(), names.end()));
  EXPECT_EQ(header->metadata.at("quote\""), "new\nline");
  EXPECT_EQ(JsonString("a\"\x1F\\\xC3\xBC"), "\"a\\\"\\u001f\\\\\xC3\xBC\"");
}

TEST(SafetensorsTest, TheWriterRefusesWhatCannotBeWritten) {
  TempDir dir;
  const UniqueFd fd = NewFile(dir);
  const auto refuses = [&](std::vector<TensorSpec> specs, const Metadata& metadata = {}) {
    return SafetensorsWriter::Create(fd.get(), specs, metadata).status().code() ==
           absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refuses({Spec("", {1})}));
  EXPECT_TRUE(refuses({Spec("__metadata__", {1})}));
  EXPECT_TRUE(refuses({Spec("\xFF", {1})}));
  EXPECT_TRUE(refuses({Spec("a", {1}), Spec("a", {1})}));
  EXPECT_TRUE(refuses({Spec("a", {1}, DType::kFloat32, {"a"})}));
  EXPECT_TRUE(refuses({Spec("a", {uint64_t{1} << 40, uint64_t{1} << 40})}));
  EXPECT_TRUE(refuses({Spec("a", {1})}, {{"key", "\xFF"}}));
  EXPECT_EQ(dir.Read("f"), "");
}

TEST(SafetensorsTest, TooMuchOrTooLittleDataIsRefused) {
  TempDir dir;
  const UniqueFd fd = NewFile(dir);
  auto writer = SafetensorsWriter::Create(fd.get(), {Spec("w", {2})}, {});
  ASSERT_TRUE(writer.ok());
  EXPECT_EQ(writer->Append(0, AsBytes("123456789")).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(writer->Append(1, AsBytes("1")).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(writer->Append(0, AsBytes("1234567")).ok());
  const auto bytes = (*std::move(writer)).Finish();
  EXPECT_EQ(bytes.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(bytes.status().message()), HasSubstr("\"w\" has 7 of 8 bytes"));
}

TEST(SafetensorsTest, AFileLargerThanTheDiskIsRefusedBeforeAnythingIsWritten) {
  TempDir dir;
  const UniqueFd fd = NewFile(dir);
  const auto writer = SafetensorsWriter::Create(fd.get(), {Spec("w", {uint64_t{1} << 47})}, {});
  EXPECT_EQ(writer.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(dir.Read("f"), "");
}

TEST(SafetensorsTest, TheFirstErrorSticks) {
  TempDir dir;
  const UniqueFd fd = NewFile(dir);
  auto writer = SafetensorsWriter::Create(fd.get(), {Spec("w", {1000})}, {});
  ASSERT_TRUE(writer.ok());
  ASSERT_NE(std::signal(SIGXFSZ, SIG_IGN), SIG_ERR);
  rlimit saved = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &saved), 0);
  rlimit small = saved;
  small.rlim_cur = 1000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status first = writer->Append(0, AsBytes(std::string(4000, 'x')));
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &saved), 0);
  EXPECT_FALSE(first.ok());
  EXPECT_EQ(writer->Append(0, AsBytes("x")), first);
  EXPECT_EQ((*std::move(writer)).Finish().status(), first);
}

struct BadHeader {
  const char* json;
  const char* message;
};

TEST(SafetensorsTest, TheReaderIsStrict) {
  const std::vector<BadHeader> bad = {
      {"", "no {"},
      {"[]", "no {"},
      {"{", "not JSON"},
      {"{} x", "not JSON"},
      {R"({"a":{"dtype":"F32","shape":[2]}})", "were expected"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})", "were expected"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,7]}})", "do not fit"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", "before they begin"},
      {R"({"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}})", "unknown dtype"},
      {R"({"a":{"dtype":7,"shape":[2],"data_offsets":[0,8]}})", "dtype is no text"},
      {R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", "no list of sizes"},
      {R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", "no list of sizes"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,9]}})", "no two numbers"},
      {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})",
       "do not fit"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", "a hole"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "the file holds 8"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
       R"("b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       "overlaps"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
       R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
       "twice"},
      {R"({"__metadata__":{"a":1}})", "is no text"},
      {R"({"__metadata__":[]})", "is no object"},
  };
  for (const BadHeader& header : bad) {
    const auto parsed = ParseSafetensorsHeader(header.json, 8);
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << header.json;
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(header.message)) << header.json;
  }
  EXPECT_TRUE(
      ParseSafetensorsHeader(R"({"a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}  )", 8)
          .ok());
}

TEST(SafetensorsTest, AFileThatIsCutIsRefused) {
  TempDir dir;
  {
    const UniqueFd fd = NewFile(dir);
    auto writer = SafetensorsWriter::Create(fd.get(), {Spec("w", {2})}, {});
    ASSERT_TRUE(writer->Append(0, AsBytes("12345678")).ok());
    ASSERT_TRUE((*std::move(writer)).Finish().ok());
  }
  const std::string bytes = dir.Read("f");
  for (size_t size = 0; size < bytes.size(); ++size) {
    dir.Write("f", bytes.substr(0, size));
    const UniqueFd fd(::open(dir.Path("f").c_str(), O_RDONLY));
    EXPECT_FALSE(ReadSafetensorsHeader(fd.get()).ok()) << size;
  }
}

#ifdef ZEROSHARD_FAULTS
TEST(SafetensorsTest, FailAtEveryPointUntilClean) {
  for (const char* point : {"storage.file.write", "storage.file.sync"}) {
    bool clean = false;
    for (int k = 1; !clean && k < 20; ++k) {
      TempDir dir;
      const UniqueFd fd = NewFile(dir);
      ResetFaultPoints();
      ASSERT_TRUE(ArmFaultPoints(absl::StrCat(point, "=return:", k)).ok());
      auto writer =
          SafetensorsWriter::Create(fd.get(), {Spec("w", {1}, DType::kFloat32, {"v"})}, {});
      clean = writer.ok() && writer->Append(0, AsBytes("1234")).ok() &&
              (*std::move(writer)).Finish().ok();
      ResetFaultPoints();
    }
    EXPECT_TRUE(clean) << point;
  }
}
#endif

}  // namespace
}  // namespace zeroshard
