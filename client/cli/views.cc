#include "client/cli/views.h"

#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/state_forms.h"
#include "client/cli/text_table.h"

namespace zeroshard {
namespace {

using admin::v1::JobSummary;

std::string Warnings(const google::protobuf::RepeatedPtrField<std::string>& warnings) {
  std::string text;
  for (const std::string& warning : warnings) absl::StrAppend(&text, "warning: ", warning, "\n");
  return text;
}

std::string LedgerText(const admin::v1::GetJobReply& reply) {
  TextTable table({"state", "tier", "holder", "bytes", "", "formula", "formula bytes"});
  std::map<std::string, uint64_t> totals;  // by tier
  for (const auto& line : reply.ledger()) {
    table.Add({line.state(), line.tier(), line.holder(), ReadableCount(line.bytes()),
               ReadableBytes(line.bytes()), line.formula(),
               line.formula().empty() ? "" : ReadableCount(line.formula_bytes())});
    totals[line.tier()] += line.bytes();
  }
  for (const auto& [tier, bytes] : totals) {
    table.Add({"all", tier, "", ReadableCount(bytes), ReadableBytes(bytes), "", ""});
  }
  return table.Text();
}

std::string MembersText(const admin::v1::GetJobReply& reply) {
  TextTable ranks({"rank", "state", "process", "worker"});
  for (const auto& rank : reply.ranks()) {
    ranks.Add({absl::StrCat(rank.rank()), rank.state(),
               rank.pid() == 0 ? "" : absl::StrCat(rank.pid()), absl::StrCat(rank.home_worker())});
  }
  TextTable workers({"worker", "device", "state", "process", "memory", "restarts", "last exit"});
  for (const auto& worker : reply.workers()) {
    workers.Add({absl::StrCat(worker.worker()), worker.device(), worker.state(),
                 worker.pid() == 0 ? "" : absl::StrCat(worker.pid()), ReadableBytes(worker.bytes()),
                 absl::StrCat(worker.restarts()), worker.last_exit()});
  }
  return absl::StrCat(ranks.Text(), "\n", workers.Text());
}

std::string CountersText(const admin::v1::GetJobReply& reply) {
  TextTable table({"counter", "value"});
  const std::map<std::string, uint64_t> sorted(reply.counters().begin(), reply.counters().end());
  for (const auto& [name, value] : sorted) table.Add({name, ReadableCount(value)});
  return table.Text();
}

// "AdamW, split master, fp32 states: 2 + G 4 + K 10 bytes a trainable parameter ..."
std::string FormsText(const model::v1::EngineConfig& config) {
  const StateForms forms = StateFormsOf(config);
  if (config.optimizer() == model::v1::OPTIMIZER_NONE) return "no updates\n";
  std::string text = absl::StrCat(forms.optimizer, ", ");
  if (forms.with_fp32.has_value()) {
    absl::StrAppend(&text, forms.master == "none" ? "no" : forms.master, " master, ");
  }
  absl::StrAppend(&text, forms.states == "-" ? "no" : forms.states, " states: ", forms.parameter,
                  " + G ", forms.gradient, " + K ", forms.optimizer_bytes,
                  " bytes a trainable parameter");
  if (forms.with_split.has_value() && forms.master != "split") {
    absl::StrAppend(&text, " (K ", *forms.with_split, " with a split master)");
  } else if (forms.with_split.has_value()) {
    absl::StrAppend(&text, " (K ", *forms.with_fp32, " with an fp32 master)");
  }
  return absl::StrCat(text, "\n");
}

// What of the states is on GPUs and on NVMe now, and what holds the job up.
std::string PlacesText(const admin::v1::GetJobReply& reply) {
  const auto counter = [&](const char* name) {
    const auto it = reply.counters().find(name);
    return it == reply.counters().end() ? uint64_t{0} : it->second;
  };
  std::vector<std::string> parts;
  for (const char* tier : {"gpu", "nvme"}) {
    const std::string name = absl::StrCat(tier, "_state_bytes");
    if (!reply.counters().contains(name)) continue;
    parts.push_back(absl::StrCat(ReadableBytes(counter(name.c_str())), " of state on ", tier));
  }
  if (!parts.empty()) parts.back() += " now";
  if (!parts.empty() && reply.moving()) {
    parts.push_back(absl::StrCat(ReadableBytes(counter("move_left_bytes")),
                                 " still to be moved to another tier"));
  }
  std::string text = absl::StrJoin(parts, ", ");
  if (!text.empty()) absl::StrAppend(&text, "\n");
  for (const std::string& note : reply.notes()) absl::StrAppend(&text, "note: ", note, "\n");
  return text;
}

std::string TierJobsText(const admin::v1::ListTiersReply& reply) {
  if (reply.jobs().empty()) return "";
  TextTable table({"job", "memory", "optimizer", "master", "states", "parameter", "G", "K",
                   "K split", "K fp32"});
  const auto or_none = [](const std::optional<uint32_t>& bytes) {
    return bytes.has_value() ? absl::StrCat(*bytes) : std::string("-");
  };
  TextTable nvme({"job", "room on nvme", "states there now"});
  TextTable gpu({"job", "room on gpu", "states there now"});
  bool any = false;
  bool any_gpu = false;
  for (const auto& job : reply.jobs()) {
    const StateForms forms = StateFormsOf(job.config());
    any |= job.nvme_bytes() > 0;
    any_gpu |= job.gpu_bytes() > 0;
    if (job.gpu_bytes() > 0) {
      gpu.Add({job.name(), ReadableBytes(job.gpu_bytes()), ReadableBytes(job.gpu_state_bytes())});
    }
    if (job.nvme_bytes() > 0) {
      nvme.Add(
          {job.name(), ReadableBytes(job.nvme_bytes()), ReadableBytes(job.nvme_state_bytes())});
    }
    table.Add({job.name(), ReadableBytes(job.bytes()), forms.optimizer, forms.master, forms.states,
               absl::StrCat(forms.parameter), absl::StrCat(forms.gradient),
               absl::StrCat(forms.optimizer_bytes), or_none(forms.with_split),
               or_none(forms.with_fp32)});
  }
  return absl::StrCat("\n", table.Text(),
                      "bytes a trainable parameter, before it is divided over the workers: the "
                      "parameter, its accumulator (G), master and states (K), and K with a split "
                      "and with an fp32 master\n",
                      any_gpu ? "\n" + gpu.Text() : "", any ? "\n" + nvme.Text() : "");
}

}  // namespace

std::string StatusText(const admin::v1::GetStatusReply& reply) {
  return absl::StrCat(
      "zeroshardd ", reply.version(), ", process ", reply.pid(), ", up ",
      ReadableSeconds(reply.uptime_seconds()), "\n", "devices      ",
      absl::StrJoin(reply.devices(), ", "), "\n", "jobs         ", reply.jobs(), "\n",
      "metrics      ",
      reply.metrics_address().empty() ? "off" : "http://" + reply.metrics_address() + "/metrics",
      "\n", "state        ", reply.state_directory(), "\n", "checkpoints  ",
      reply.checkpoint_directory(), "\n", "exports      ", reply.export_directory(), "\n");
}

std::string JobsText(const admin::v1::ListJobsReply& reply) {
  if (reply.jobs().empty()) return "no jobs\n";
  TextTable table(
      {"job", "state", "step", "stage", "ranks", "workers", "parameters", "memory", "reason"});
  for (const JobSummary& job : reply.jobs()) {
    table.Add({job.name(), job.state(), absl::StrCat(job.step()), absl::StrCat(job.stage()),
               absl::StrCat(job.attached(), "/", job.world_size()), absl::StrCat(job.workers()),
               ReadableCount(job.parameters()), ReadableBytes(job.bytes()), job.reason()});
  }
  return table.Text();
}

std::string JobText(const admin::v1::GetJobReply& reply) {
  const JobSummary& job = reply.summary();
  return absl::StrCat("job ", job.name(), ": ", job.state(), " (", job.reason(), ")\n", "step ",
                      job.step(), ", generation ", job.generation(), ", stage ", job.stage(), ", ",
                      ReadableCount(job.parameters()), " parameters, loss scale ",
                      reply.loss_scale(), ", gradient norm ", reply.grad_norm(), "\n",
                      FormsText(reply.config()), PlacesText(reply), "\n", MembersText(reply), "\n",
                      LedgerText(reply), "\n", CountersText(reply), Warnings(reply.warnings()));
}

std::string TiersText(const admin::v1::ListTiersReply& reply) {
  TextTable table({"tier", "capacity", "used", "free", "note"});
  for (const auto& tier : reply.tiers()) {
    table.Add({tier.name(), ReadableBytes(tier.capacity_bytes()), ReadableBytes(tier.used_bytes()),
               ReadableBytes(tier.free_bytes()), tier.note()});
  }
  return absl::StrCat(table.Text(), TierJobsText(reply));
}

std::string NvmeFilesText(const admin::v1::ListNvmeFilesReply& reply) {
  if (reply.files().empty()) return "no files\n";
  TextTable table({"path", "file", "bytes", "kind", "reason"});
  for (const auto& file : reply.files()) {
    table.Add({file.path(), file.name(), ReadableBytes(file.bytes()), file.kind(), file.reason()});
  }
  if (reply.freed_bytes() == 0) return table.Text();
  return absl::StrCat(table.Text(), ReadableBytes(reply.freed_bytes()), " freed\n");
}

std::string ConfigText(const admin::v1::ResolveConfigReply& reply) {
  TextTable table({"key", "value", "origin", "note"});
  for (const auto& value : reply.values()) {
    table.Add({value.key(), value.value(), value.origin(), value.note()});
  }
  return absl::StrCat(table.Text(), Warnings(reply.warnings()));
}

}  // namespace zeroshard
