#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "tests/fakes/local_job.h"
#include "worker/reduce_kernel.h"

// What the ranks of a LocalJob do and see.
namespace zeroshard {

void LocalJob::Hello(uint32_t rank, bool reconnect) {
  if (!reconnect) {
    rank_generation_[rank] = next_generation();
    next_id_[rank] = 0;
    sent_[rank].clear();
  }
  trainer::v1::Hello hello;
  hello.set_rank(rank);
  hello.set_generation(rank_generation_[rank]);
  hello.set_reconnect(reconnect);
  workers_[home(rank)].engine->OnHello(rank, hello);
}

uint64_t LocalJob::Send(uint32_t rank, trainer::v1::SessionRequest request) {
  request.set_id(++next_id_[rank]);
  Resend(rank, request);
  const uint64_t id = request.id();
  std::erase_if(sent_[rank], [&](const auto& entry) { return Done(rank, entry.first); });
  sent_[rank][id] = std::move(request);
  return id;
}

void LocalJob::Reconnect(uint32_t rank) {
  Hello(rank, /*reconnect=*/true);
  for (const auto& [id, request] : sent_[rank]) {
    if (!Done(rank, id)) Resend(rank, request);
  }
}

void LocalJob::Resend(uint32_t rank, const trainer::v1::SessionRequest& request) {
  workers_[home(rank)].engine->OnRequest(rank, request);
}

bool LocalJob::Done(uint32_t rank, uint64_t id) const {
  const RankPage* page = rank_pages_[rank].As<RankPage>();
  return page->slots[id % kMaxPendingRequests].load() == id * 4 + RankPage::kOk;
}

StepResult LocalJob::result(uint32_t rank) const {
  return rank_pages_[rank].As<RankPage>()->result;
}

void LocalJob::PutParameters(const std::vector<std::vector<float>>& values) {
  for (uint32_t u = 0; u < layout_->units().size(); ++u) {
    const Unit& unit = layout_->units()[u];
    // Padding holds NaN: nothing may ever read it.
    std::vector<float> flat(unit.elements(), std::numeric_limits<float>::quiet_NaN());
    for (uint32_t parameter : unit.parameters) {
      std::copy(values[parameter].begin(), values[parameter].end(),
                flat.begin() + static_cast<ptrdiff_t>(layout_->place(parameter).offset));
    }
    ConvertElements(flat.data(), DType::kFloat32, gradient_window(0), unit.dtype, flat.size());
    trainer::v1::SessionRequest request;
    request.mutable_put()->set_unit(u);
    request.mutable_put()->set_elements(unit.elements());
    const uint64_t id = Send(0, request);
    Run();
    ZS_CHECK(Done(0, id), "put not complete");
  }
}

std::vector<uint64_t> LocalJob::ScatterAll(uint32_t rank, uint32_t micro_step,
                                           const std::vector<std::vector<float>>& gradients,
                                           float weight) {
  std::vector<uint64_t> ids;
  uint64_t offset = 0;
  for (uint32_t u = 0; u < layout_->units().size(); ++u) {
    const Unit& unit = layout_->units()[u];
    if (!unit.trainable) continue;
    std::vector<float> flat(unit.elements(), std::numeric_limits<float>::quiet_NaN());
    std::string present((unit.parameters.size() + 7) / 8, '\0');
    bool any = false;
    for (uint32_t position = 0; position < unit.parameters.size(); ++position) {
      const uint32_t parameter = unit.parameters[position];
      if (gradients[parameter].empty()) continue;
      any = true;
      present[position / 8] = static_cast<char>(present[position / 8] | 1 << (position % 8));
      std::copy(gradients[parameter].begin(), gradients[parameter].end(),
                flat.begin() + static_cast<ptrdiff_t>(layout_->place(parameter).offset));
    }
    if (!any) continue;
    ConvertElements(flat.data(), DType::kFloat32, gradient_window(rank) + offset, unit.dtype,
                    flat.size());
    if (options_.data_plane != nullptr) {
      Presence bits = {};
      std::memcpy(bits.data(), present.data(), present.size());
      options_.data_plane->Scatter({.rank = rank,
                                    .unit = u,
                                    .micro_step = micro_step,
                                    .values = {gradient_window(rank) + offset, unit.bytes()},
                                    .present = bits,
                                    .weight = weight == 0.0f ? 1.0f : weight});
    }
    trainer::v1::SessionRequest request;
    request.mutable_scatter()->set_unit(u);
    request.mutable_scatter()->set_micro_step(micro_step);
    request.mutable_scatter()->set_window_offset(offset);
    request.mutable_scatter()->set_present(present);
    request.mutable_scatter()->set_weight(weight);
    ids.push_back(Send(rank, request));
    offset += unit.bytes();
  }
  trainer::v1::SessionRequest end;
  end.mutable_micro_end()->set_micro_step(micro_step);
  ids.push_back(Send(rank, end));
  return ids;
}

uint64_t LocalJob::Step(uint32_t rank, uint32_t micro_steps, double lr,
                        const std::string& user_state, double weight_total) {
  if (options_.data_plane != nullptr) {
    options_.data_plane->Boundary(rank, memory(home(rank)).board().attempt());
  }
  trainer::v1::SessionRequest request;
  trainer::v1::Step& step = *request.mutable_step();
  step.set_micro_steps(micro_steps);
  step.set_user_state(user_state);
  step.set_weight_total(weight_total);
  for (int i = 0; i < options_.manifest.groups_size(); ++i) {
    model::v1::GroupOptions& group = *step.add_groups();
    group.set_lr(lr);
    group.set_beta1(0.9);
    group.set_beta2(0.999);
    group.set_eps(1e-8);
    group.set_weight_decay(0.1);
    group.set_momentum(options_.config.state_slots_size() > 0 ? 0.9 : 0.0);
    group.set_bias_correction(true);
  }
  return Send(rank, request);
}

std::vector<float> LocalJob::Parameter(uint32_t parameter, uint32_t island) const {
  const ParameterPlace& place = layout_->place(parameter);
  const Unit& unit = layout_->units()[place.unit];
  std::vector<float> values(place.elements);
  ConvertElements(windows_[island].data() + unit.window_offset + place.offset * SizeOf(unit.dtype),
                  unit.dtype, values.data(), DType::kFloat32, values.size());
  return values;
}

std::string LocalJob::StateBytes() {
  std::map<std::string, std::string> by_kind;  // "unit kind" -> bytes in grain order
  for (uint32_t u = 0; u < layout_->units().size(); ++u) {
    for (uint32_t w = 0; w < options_.workers; ++w) {
      const Shard& shard = engine(w).shard();
      for (const StateArray& array : shard.StateArrays(u, Shard::Extent::kShard)) {
        std::vector<std::byte> read[1];
        const absl::Status status = shard.ReadArrays(u, {&array, 1}, array.grains, read);
        ZS_CHECK(status.ok(), std::string(status.message()));
        const std::vector<std::byte>& bytes = read[0];
        std::string& all = by_kind[absl::StrCat(u, " ", array.kind)];
        const auto* const data = reinterpret_cast<const char*>(bytes.data());
        if (array.source == StateArray::Source::kScales) {
          all.append(data, bytes.size());
          continue;
        }
        // Padding is no state: it is left out, element by element of the parameters.
        const uint64_t element_bytes = array.type.grain_bytes() / kGrainElements;
        const auto ranges =
            PresentRanges(*layout_, u, FullPresence(layout_->units()[u]),
                          array.grains.first_element(), array.grains.end * kGrainElements);
        for (const ElementRange& range : ranges) {
          all.append(data + (range.begin - array.grains.first_element()) * element_bytes,
                     (range.end - range.begin) * element_bytes);
        }
      }
    }
  }
  std::string all;
  for (const auto& [kind, bytes] : by_kind)
    absl::StrAppend(&all, kind, ":", bytes.size(), "\n", bytes);
  return all;
}

}  // namespace zeroshard
