#include "storage/layout.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/checksum.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/utf8.h"

namespace zeroshard {
namespace {

// One class of a module's parameters: what must lie in one unit.
struct Part {
  DType dtype = DType::kFloat32;
  bool trainable = true;
  uint64_t elements = 0;
  std::vector<uint32_t> parameters;
};

constexpr uint64_t RoundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Number of a (data type, trainability) pair.
constexpr size_t ClassOf(DType dtype, bool trainable) {
  return static_cast<size_t>(dtype) * 2 + (trainable ? 1 : 0);
}
constexpr size_t kClasses = 6;

absl::Status CheckName(std::string_view name) {
  if (name.empty()) return absl::InvalidArgumentError("the name is empty");
  if (name.size() > kMaxNameBytes) {
    return absl::InvalidArgumentError(absl::StrCat("the name has ", name.size(), " bytes, at most ",
                                                   kMaxNameBytes, " are allowed"));
  }
  if (!IsUtf8(name)) return absl::InvalidArgumentError("the name is not valid UTF-8");
  if (name == "__metadata__") {
    return absl::InvalidArgumentError("the name __metadata__ is reserved by safetensors");
  }
  return absl::OkStatus();
}

// The product of the shape; a zero dimension wins over dimensions that would overflow.
absl::StatusOr<uint64_t> CountElements(std::span<const uint64_t> shape) {
  if (shape.size() > kMaxDimensions) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the shape has ", shape.size(), " dimensions, at most ", kMaxDimensions, " are allowed"));
  }
  uint64_t elements = 1;
  for (uint64_t dimension : shape) {
    if (dimension > kMaxElements) {
      return absl::InvalidArgumentError(
          absl::StrCat("dimension ", dimension, " is above ", kMaxElements));
    }
    if (dimension == 0) elements = 0;
  }
  for (uint64_t dimension : shape) {
    if (elements != 0 && dimension > kMaxElements / elements) {
      return absl::InvalidArgumentError(
          absl::StrCat("the shape has more than ", kMaxElements, " elements"));
    }
    elements *= dimension;
  }
  return elements;
}

absl::Status CheckParameter(const ParameterSpec& spec,
                            std::unordered_set<std::string_view>& names) {
  if (!IsValidDType(static_cast<uint8_t>(spec.dtype))) {
    return absl::InvalidArgumentError("the data type is unknown");
  }
  if (spec.module.size() > kMaxNameBytes) {
    return absl::InvalidArgumentError("the module's name is too long");
  }
  ZS_RETURN_IF_ERROR(CheckName(spec.name));
  if (!names.insert(spec.name).second) {
    return absl::InvalidArgumentError("the name is used twice");
  }
  for (const std::string& alias : spec.aliases) {
    ZS_RETURN_IF_ERROR(Annotate(CheckName(alias), absl::StrCat("alias \"", alias, "\"")));
    if (!names.insert(alias).second) {
      return absl::InvalidArgumentError(absl::StrCat("alias \"", alias, "\" is used twice"));
    }
  }
  return absl::OkStatus();
}

// The parts of all modules in the order of their first parameters, none with more parameters than a
// unit may have.
std::vector<Part> SplitIntoParts(std::span<const ParameterSpec> parameters,
                                 std::span<const ParameterPlace> places) {
  std::vector<Part> parts;
  // Index + 1 of the part that a class has open; 0 for none.
  using OpenParts = std::array<uint32_t, kClasses>;
  std::unordered_map<std::string_view, OpenParts> modules;
  modules.reserve(parameters.size());
  for (uint32_t i = 0; i < parameters.size(); ++i) {
    const ParameterSpec& spec = parameters[i];
    uint32_t& open = modules[spec.module][ClassOf(spec.dtype, spec.trainable)];
    if (open == 0 || parts[open - 1].parameters.size() == kMaxUnitParameters) {
      parts.push_back({spec.dtype, spec.trainable, 0, {}});
      open = static_cast<uint32_t>(parts.size());
    }
    parts[open - 1].elements += places[i].elements;
    parts[open - 1].parameters.push_back(i);
  }
  return parts;
}

// Joins a small part to the unit its class has open, if that is small too; a part that is not small
// closes its class.
std::vector<Unit> CoalesceParts(std::vector<Part> parts) {
  std::vector<Unit> units;
  std::array<std::optional<size_t>, kClasses> open_units;
  for (Part& part : parts) {
    std::optional<size_t>& open = open_units[ClassOf(part.dtype, part.trainable)];
    const bool small = part.elements < kCoalesceElements;
    const bool joins =
        open && small && units[*open].data_elements < kCoalesceElements &&
        units[*open].parameters.size() + part.parameters.size() <= kMaxUnitParameters;
    if (joins) {
      Unit& unit = units[*open];
      unit.parameters.insert(unit.parameters.end(), part.parameters.begin(), part.parameters.end());
      unit.data_elements += part.elements;
      continue;
    }
    open = small ? std::optional<size_t>(units.size()) : std::nullopt;
    Unit& unit = units.emplace_back();
    unit.dtype = part.dtype;
    unit.trainable = part.trainable;
    unit.parameters = std::move(part.parameters);
    unit.data_elements = part.elements;
  }
  return units;
}

// Appends values to a buffer that is hashed; lengths are written before what they count, so that no
// two manifests give the same bytes.
static_assert(std::endian::native == std::endian::little);
class Canonical {
 public:
  void Add(uint64_t value) {
    char bytes[sizeof(value)];
    std::memcpy(bytes, &value, sizeof(value));
    bytes_.append(bytes, sizeof(bytes));
  }
  void Add(std::string_view text) {
    Add(uint64_t{text.size()});
    bytes_.append(text);
  }
  uint64_t Hash() const { return Xxh3_64(bytes_); }

 private:
  std::string bytes_;
};

uint64_t Fingerprint(std::span<const ParameterSpec> parameters, std::span<const Unit> units,
                     std::span<const ParameterPlace> places) {
  Canonical canonical;
  canonical.Add(std::string_view("zeroshard layout 1"));
  canonical.Add(kGrainElements);
  canonical.Add(uint64_t{parameters.size()});
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ParameterSpec& spec = parameters[i];
    canonical.Add(spec.name);
    canonical.Add(uint64_t{spec.aliases.size()});
    for (const std::string& alias : spec.aliases) canonical.Add(alias);
    canonical.Add(uint64_t{spec.shape.size()});
    for (uint64_t dimension : spec.shape) canonical.Add(dimension);
    canonical.Add(uint64_t{ClassOf(spec.dtype, spec.trainable)});
    canonical.Add(uint64_t{spec.group});
    canonical.Add(spec.module);
    canonical.Add(uint64_t{places[i].unit});
    canonical.Add(places[i].offset);
  }
  canonical.Add(uint64_t{units.size()});
  for (const Unit& unit : units) {
    canonical.Add(unit.grains);
    canonical.Add(unit.window_offset);
  }
  return canonical.Hash();
}

}  // namespace

absl::StatusOr<Layout> Layout::Create(std::vector<ParameterSpec> parameters, uint32_t workers) {
  if (parameters.empty()) return absl::InvalidArgumentError("the manifest has no parameters");
  if (parameters.size() > kMaxParameters) {
    return absl::InvalidArgumentError(absl::StrCat("the manifest has ", parameters.size(),
                                                   " parameters, at most ", kMaxParameters,
                                                   " are allowed"));
  }
  if (workers == 0 || workers > kMaxWorkers) {
    return absl::InvalidArgumentError(
        absl::StrCat(workers, " workers: from 1 to ", kMaxWorkers, " are allowed"));
  }
  Layout layout;
  layout.workers_ = workers;
  layout.parameters_ = std::move(parameters);
  ZS_RETURN_IF_ERROR(layout.CheckParameters());
  layout.units_ = CoalesceParts(SplitIntoParts(layout.parameters_, layout.places_));
  layout.PlaceUnits();
  layout.fingerprint_ = Fingerprint(layout.parameters_, layout.units_, layout.places_);
  return layout;
}

absl::Status Layout::CheckParameters() {
  std::unordered_set<std::string_view> names;
  names.reserve(parameters_.size());
  places_.resize(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterSpec& spec = parameters_[i];
    absl::StatusOr<uint64_t> elements = CountElements(spec.shape);
    absl::Status status = elements.status();
    KeepFirstError(status, CheckParameter(spec, names));
    if (!status.ok()) {
      return Annotate(status, absl::StrCat("parameter ", i, " \"", spec.name, "\""));
    }
    places_[i].elements = *elements;
    data_elements_ += *elements;
    if (spec.trainable) trainable_elements_ += *elements;
    // Each count is at most 2^48, so that the sum cannot wrap before it is refused.
    if (data_elements_ > kMaxElements) {
      return absl::InvalidArgumentError(absl::StrCat("with parameter ", i, " \"", spec.name,
                                                     "\" the manifest has more than ", kMaxElements,
                                                     " elements"));
    }
  }
  return absl::OkStatus();
}

void Layout::PlaceUnits() {
  for (uint32_t u = 0; u < units_.size(); ++u) {
    Unit& unit = units_[u];
    uint64_t offset = 0;
    for (uint32_t parameter : unit.parameters) {
      ParameterPlace& place = places_[parameter];
      place.unit = u;
      place.offset = RoundUp(offset, kParameterAlignment);
      offset = place.offset + place.elements;
    }
    unit.grains = RoundUp(offset, kGrainElements) / kGrainElements;
    unit.window_offset = window_bytes_;
    window_bytes_ += RoundUp(unit.bytes(), kWindowAlignment);
  }
}

GrainRange Layout::slice(uint32_t unit, uint32_t worker) const {
  const uint64_t grains = units_[unit].grains;
  return {grains * worker / workers_, grains * (uint64_t{worker} + 1) / workers_};
}

uint32_t Layout::owner(uint32_t unit, uint64_t grain) const {
  // The largest w with floor(w * grains / workers) <= grain.
  return static_cast<uint32_t>(((grain + 1) * workers_ - 1) / units_[unit].grains);
}

}  // namespace zeroshard
