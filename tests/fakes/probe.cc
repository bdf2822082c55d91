// A trainer without a model, driven from outside: for process tests of the daemon.
//
//   probe SOCKET health | services
//   probe SOCKET watch JOB        each event, until the job ends
//   probe SOCKET attach '{"job": "a", "rank": 0, "world_size": 1, ...}'
//
// Prints one JSON object a line: {"ok": true, ...} or {"ok": false, "code": "...", "message":
// "..."}. After an attach it takes commands from stdin: "regions", "page", "read", "detach",
// "keep", "save NAME", "export NAME"; with a data plane "again REASON", "set KEY VALUE", "get KEY
// TIMEOUT_MS", "counters"; and ends, without detaching, when stdin closes. "gpu": the number of the
// fake worker's GPU that it trains on.
#include <fcntl.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "base/fd_passing.h"
#include "base/shared_memory.h"
#include "client/cli/proto_json.h"
#include "proto/trainer.grpc.pb.h"
#include "storage/device_counters.h"
#include "storage/rank_page.h"

namespace zeroshard {
namespace {

using Json = nlohmann::ordered_json;
using trainer::v1::AttachReply;
using trainer::v1::AttachRequest;

constexpr absl::Duration kTimeout = absl::Seconds(10);
constexpr char kDefaultConfig[] = R"({"train_micro_batch_size_per_gpu": 1,
  "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}})";

const char* CodeName(int code) {
  static constexpr const char* kNames[] = {"OK",
                                           "CANCELLED",
                                           "UNKNOWN",
                                           "INVALID_ARGUMENT",
                                           "DEADLINE_EXCEEDED",
                                           "NOT_FOUND",
                                           "ALREADY_EXISTS",
                                           "PERMISSION_DENIED",
                                           "RESOURCE_EXHAUSTED",
                                           "FAILED_PRECONDITION",
                                           "ABORTED",
                                           "OUT_OF_RANGE",
                                           "UNIMPLEMENTED",
                                           "INTERNAL",
                                           "UNAVAILABLE",
                                           "DATA_LOSS",
                                           "UNAUTHENTICATED"};
  return code >= 0 && code < static_cast<int>(std::size(kNames)) ? kNames[code] : "UNKNOWN";
}

bool Print(Json object) {
  std::cout << object.dump() << std::endl;
  return true;
}

bool Report(int code, const std::string& message) {
  Print({{"ok", false}, {"code", CodeName(code)}, {"message", message}});
  return false;
}

std::unique_ptr<grpc::ClientContext> Context() {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  return context;
}

// One parameter "w" of the given shape; "parameters": [[name, shape, dtype], ...] for others, with
// a false at the end for a frozen one.
void FillManifest(const Json& spec, model::v1::Manifest& manifest) {
  const Json parameters =
      spec.value("parameters", Json::array({Json::array({"w", Json::array({4, 2}), "float32"})}));
  for (const Json& one : parameters) {
    model::v1::Parameter& parameter = *manifest.add_parameters();
    parameter.set_name(one[0].get<std::string>());
    for (const Json& size : one[1]) parameter.add_shape(size.get<uint64_t>());
    const std::string dtype = one[2].get<std::string>();
    parameter.set_dtype(dtype == "bfloat16" ? model::v1::DTYPE_BFLOAT16 : model::v1::DTYPE_FLOAT32);
    parameter.set_trainable(one.size() < 4 || one[3].get<bool>());
    parameter.set_module(parameter.name());
  }
  manifest.add_groups()->set_lr(0.001);
}

AttachRequest MakeRequest(const Json& spec) {
  AttachRequest request;
  request.set_job(spec.value("job", "job"));
  request.set_rank(spec.value("rank", 0U));
  request.set_world_size(spec.value("world_size", 1U));
  request.set_local_ranks(spec.value("local_ranks", 0U));
  request.set_timeout_ms(spec.value("timeout_ms", 10000U));
  request.set_forward_only(spec.value("forward_only", false));
  request.set_ds_config(spec.value("config", kDefaultConfig));
  FillManifest(spec, *request.mutable_manifest());
  if (spec.contains("gpu")) {
    std::string uuid(16, '\0');
    uuid[3] = static_cast<char>(spec["gpu"].get<int>());
    request.mutable_device()->set_uuid(uuid);
    request.mutable_device()->set_name("Fake GPU");
  }
  return request;
}

class Probe {
 public:
  explicit Probe(const std::string& socket)
      : channel_(grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials())),
        trainer_(trainer::v1::Trainer::NewStub(channel_)) {}

  bool Attach(const Json& spec) {
    request_ = MakeRequest(spec);
    const grpc::Status status = trainer_->Attach(Context().get(), request_, &reply_);
    if (!status.ok()) return Report(status.error_code(), status.error_message());
    return Print({{"ok", true}, {"reply", ToJson(reply_)}});
  }
  bool Do(const std::string& line);

 private:
  bool Detach(bool keep);
  bool Regions();
  bool Page();
  bool Read();
  bool Save(const std::string& name);
  bool Export(const std::string& name);
  bool Again(const std::string& reason);
  bool Rendezvous(const std::string& key, const std::string& value, uint32_t timeout_ms);
  bool Counters();
  absl::StatusOr<Message> Fetch() const;
  // Of a region that the reply lists, among its descriptors.
  int Index(trainer::v1::Region::Kind kind) const;

  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<trainer::v1::Trainer::Stub> trainer_;
  AttachRequest request_;
  AttachReply reply_;
  MappedRegion window_;  // once it was read
};

bool Probe::Do(const std::string& line) {
  std::istringstream words(line);
  std::string verb, name;
  words >> verb >> name;
  if (verb == "detach") return Detach(false);
  if (verb == "keep") return Detach(true);
  if (verb == "regions") return Regions();
  if (verb == "page") return Page();
  if (verb == "read") return Read();
  if (verb == "save") return Save(name);
  if (verb == "export") return Export(name);
  std::string rest;
  std::getline(words >> std::ws, rest);
  if (verb == "again") return Again(name.empty() ? "" : rest.empty() ? name : name + " " + rest);
  if (verb == "set") return Rendezvous(name, rest, 0);
  if (verb == "get") return Rendezvous(name, "", static_cast<uint32_t>(std::stoul(rest)));
  if (verb == "counters") return Counters();
  return Report(3, "unknown command " + line);
}

bool Probe::Detach(bool keep) {
  trainer::v1::DetachRequest request;
  trainer::v1::DetachReply reply;
  request.set_job(request_.job());
  request.set_rank(request_.rank());
  request.set_token(reply_.token());
  request.set_keep(keep);
  const grpc::Status status = trainer_->Detach(Context().get(), request, &reply);
  if (!status.ok()) return Report(status.error_code(), status.error_message());
  return Print({{"ok", true}});
}

absl::StatusOr<Message> Probe::Fetch() const {
  auto socket = ConnectUnix(reply_.descriptor_socket(), kTimeout);
  if (!socket.ok()) return socket.status();
  if (auto sent = SendMessage(socket->get(), reply_.token(), {}, kTimeout); !sent.ok()) return sent;
  return ReceiveMessage(socket->get(), kTimeout);
}

// Size of each region, and what the descriptor allows.
bool Probe::Regions() {
  const absl::StatusOr<Message> message = Fetch();
  if (!message.ok()) {
    return Report(static_cast<int>(message.status().code()),
                  std::string(message.status().message()));
  }
  Json regions = Json::array();
  for (const UniqueFd& fd : message->fds) {
    struct stat info {};
    fstat(fd.get(), &info);
    const int seals = fcntl(fd.get(), F_GET_SEALS);
    regions.push_back({{"bytes", info.st_size},
                       {"mode", info.st_mode & 0777},
                       {"writable", (fcntl(fd.get(), F_GETFL) & O_ACCMODE) == O_RDWR},
                       {"sealed", (seals & F_SEAL_SHRINK) != 0 && (seals & F_SEAL_GROW) != 0}});
  }
  return Print({{"ok", message->bytes == "ok"}, {"answer", message->bytes}, {"regions", regions}});
}

int Probe::Index(trainer::v1::Region::Kind kind) const {
  for (int i = 0; i < reply_.regions_size(); ++i) {
    if (reply_.regions(i).kind() == kind) return i;
  }
  return 0;
}

// Attaches anew, in the same process.
bool Probe::Again(const std::string& reason) {
  request_.set_gave_up(reason);
  const grpc::Status status = trainer_->Attach(Context().get(), request_, &reply_);
  if (!status.ok()) return Report(status.error_code(), status.error_message());
  return Print({{"ok", true}, {"reply", ToJson(reply_)}});
}

bool Probe::Rendezvous(const std::string& key, const std::string& value, uint32_t timeout_ms) {
  trainer::v1::RendezvousRequest request;
  trainer::v1::RendezvousReply reply;
  request.set_job(request_.job());
  request.set_token(reply_.token());
  request.set_generation(reply_.generation());
  request.set_key(key);
  if (!value.empty()) request.set_value(value);
  request.set_timeout_ms(timeout_ms);
  const grpc::Status status = trainer_->Rendezvous(Context().get(), request, &reply);
  if (!status.ok()) return Report(status.error_code(), status.error_message());
  return Print({{"ok", true}, {"value", reply.value()}});
}

bool Probe::Counters() {
  const absl::StatusOr<Message> message = Fetch();
  if (!message.ok() || message->fds.size() < 4) return Report(14, "no descriptors");
  const int index = Index(trainer::v1::Region::KIND_DEVICE_COUNTERS);
  auto map = MappedRegion::Map(message->fds[index].get(), kDeviceCounterBytes, Access::kReadWrite);
  if (!map.ok()) return Report(13, std::string(map.status().message()));
  return Print({{"ok", true}, {"summed", map->As<DeviceCounters>()->summed.load()}});
}

bool Probe::Page() {
  const absl::StatusOr<Message> message = Fetch();
  if (!message.ok() || message->fds.size() < 3) return Report(14, "no descriptors");
  const int index = Index(trainer::v1::Region::KIND_RANK_PAGE);
  auto map = MappedRegion::Map(message->fds[index].get(), sizeof(RankPage), Access::kReadOnly);
  if (!map.ok()) return Report(13, std::string(map.status().message()));
  const RankPage* page = map->As<const RankPage>();
  return Print({{"ok", page->magic == kRankPageMagic},
                {"poisoned", page->poisoned.load()},
                {"generation", page->generation.load()}});
}

// Maps the parameter window, reads every byte of it, and keeps it mapped.
bool Probe::Read() {
  const absl::StatusOr<Message> message = Fetch();
  if (!message.ok() || message->fds.size() != 3) return Report(14, "no descriptors");
  auto map = MappedRegion::Map(message->fds[0].get(), reply_.regions(0).bytes(), Access::kReadOnly);
  if (!map.ok()) return Report(13, std::string(map.status().message()));
  window_ = *std::move(map);
  uint64_t sum = 0;
  for (const std::byte byte : window_.bytes()) sum += static_cast<uint64_t>(byte);
  return Print({{"ok", true}, {"bytes", window_.size()}, {"sum", sum}});
}

bool Probe::Save(const std::string& name) {
  trainer::v1::SaveRequest request;
  trainer::v1::SaveReply reply;
  request.set_job(request_.job());
  request.set_token(reply_.token());
  request.set_name(name);
  const grpc::Status status = trainer_->Save(Context().get(), request, &reply);
  if (!status.ok()) return Report(status.error_code(), status.error_message());
  return Print({{"ok", true}, {"reply", ToJson(reply)}});
}

bool Probe::Export(const std::string& name) {
  trainer::v1::ExportRequest request;
  trainer::v1::ExportReply reply;
  request.set_job(request_.job());
  request.set_token(reply_.token());
  request.set_name(name);
  const grpc::Status status = trainer_->Export(Context().get(), request, &reply);
  if (!status.ok()) return Report(status.error_code(), status.error_message());
  return Print({{"ok", true}, {"reply", ToJson(reply)}});
}

// grpc.health.v1.Health/Check with an empty request; the answer's field 1 is 1 when serving.
int Raw(const std::string& socket, const std::string& method, const std::string& body) {
  auto channel = grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  grpc::CompletionQueue queue;
  grpc::GenericStub stub(channel);
  auto call = stub.PrepareCall(&context, method, &queue);
  auto wait = [&] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  call->StartCall(nullptr);
  wait();
  grpc::Slice slice(body);
  call->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), nullptr);
  wait();
  grpc::ByteBuffer answer;
  call->Read(&answer, nullptr);
  const bool got = wait();
  grpc::Status status;
  call->Finish(&status, nullptr);
  wait();
  if (!got) return Report(status.error_code(), status.error_message()) ? 0 : 1;
  std::vector<grpc::Slice> slices;
  static_cast<void>(answer.Dump(&slices));
  std::string bytes;
  for (const grpc::Slice& one : slices) {
    bytes.append(reinterpret_cast<const char*>(one.begin()), one.size());
  }
  std::string printable;
  for (const char c : bytes) printable += c >= ' ' && c <= '~' ? c : ' ';
  Print({{"ok", true}, {"text", printable}, {"serving", bytes == std::string("\x08\x01", 2)}});
  return 0;
}

// Prints every event of a job until the daemon ends the stream.
int Watch(const std::string& socket, const std::string& job) {
  auto stub = trainer::v1::Trainer::NewStub(
      grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials()));
  trainer::v1::WatchRequest request;
  request.set_job(job);
  const std::unique_ptr<grpc::ClientContext> context = Context();
  auto stream = stub->Watch(context.get(), request);
  stream->WaitForInitialMetadata();
  Print({{"kind", "watching"}});
  trainer::v1::WatchEvent event;
  while (stream->Read(&event)) {
    Print({{"kind", event.kind()},
           {"text", event.text()},
           {"generation", event.generation()},
           {"step", event.step()}});
  }
  const grpc::Status status = stream->Finish();
  if (!status.ok()) return Report(status.error_code(), status.error_message()) ? 0 : 1;
  return 0;
}

int Main(int argc, char** argv) {
  const std::string socket = argc > 2 ? argv[1] : "";
  const std::string verb = argc > 2 ? argv[2] : "";
  if (verb == "health") return Raw(socket, "/grpc.health.v1.Health/Check", "");
  if (verb == "watch" && argc == 4) return Watch(socket, argv[3]);
  // ServerReflectionRequest{list_services: ""}: field 7, empty.
  if (verb == "services") {
    return Raw(socket, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
               std::string("\x3a\x00", 2));
  }
  if (verb != "attach" || argc != 4) {
    std::cerr << "usage: probe SOCKET health|services|watch JOB|attach JSON\n";
    return 2;
  }
  const Json spec = Json::parse(argv[3], nullptr, /*allow_exceptions=*/false);
  Probe probe(socket);
  if (!spec.is_object()) return Report(3, "the third argument is no JSON object") ? 0 : 2;
  if (!probe.Attach(spec)) return 1;
  std::string line;
  while (std::getline(std::cin, line)) probe.Do(line);
  return 0;
}

}  // namespace
}  // namespace zeroshard

int main(int argc, char** argv) { return zeroshard::Main(argc, argv); }
